"""What the project's HTTP servers share: the live page and the OpenAI front."""
