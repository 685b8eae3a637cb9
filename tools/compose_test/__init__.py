"""Run the loop in containers, as `compose.yaml` describes it, and sees what becomes of it."""
