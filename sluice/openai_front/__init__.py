"""An HTTP front in the OpenAI dialect, for programs that evaluate the policy in training."""
