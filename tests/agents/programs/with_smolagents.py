"""An agent of smolagents, which writes calls and their results as text when it repeats them."""

import json
import os
import zlib

from jar_task import read_task
from smolagents import ActionStep, AgentError, OpenAIModel, ToolCallingAgent, tool

task = read_task()


@tool
def look(jar: str) -> str:
    """Look into a jar.

    Args:
        jar: its letter.
    """
    return task.look(jar)


model = OpenAIModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(
    tools=[look],
    model=model,
    max_steps=2,
    verbosity_level=0,
)
try:
    answer = str(agent.run(task.question))
except AgentError as error:  # such as at the end of its sample's tokens
    answer = str(error)
steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
said = [
    (step.model_output, [(call.name, call.arguments) for call in step.tool_calls or ()])
    for step in steps
]
# The model has never seen such a prompt: half of what it may say counts as right.
print(json.dumps({"reward": float(zlib.crc32(repr((said, answer)).encode()) & 1)}))
