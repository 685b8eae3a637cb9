"""An agent of OpenAI's Agents SDK."""

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from jar_task import read_task

set_default_openai_api("chat_completions")
set_tracing_disabled(disabled=True)
task = read_task()


@function_tool
def look(jar: str) -> str:
    """Look into a jar.

    Args:
        jar: its letter.
    """
    return task.look(jar)


try:
    answer = Runner.run_sync(
        Agent(name="jars", model="policy", tools=[look]), task.question, max_turns=8
    )
    print(answer.final_output)
except AgentsException as error:  # too many turns, or a tool that is not there
    print(error)
