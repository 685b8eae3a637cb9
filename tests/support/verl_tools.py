"""verl's tools, as its users have them: a file of functions, a class and its YAML."""

from __future__ import annotations

from pathlib import Path

from sluice.environment.source import EnvironmentSource

FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool("web_search")
async def search(query: str, count: int = 3):
    """Search.

    Args:
        query: words.
        count: results.
    """
    return {"found": query, "count": count}, 0.5, {"hits": 1}

@function_tool
def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: e.g. "(3+4)*5".
    """
    return str(eval(expression, {"__builtins__": {}}, {}))
'''
CLASSES = """
from typing import Any, Optional
from uuid import uuid4
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

class Notes(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.kept = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = str(uuid4())
        self.kept[instance_id] = [kwargs["create_kwargs"]["first"]]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.kept[instance_id].append(parameters["text"])
        open_instances = len(self.kept)
        return ToolResponse(text=f"{self.kept[instance_id]} {open_instances}"), 0.0, {}

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.kept[instance_id]
"""
CONFIG = """
tools:
  - class_name: verl_notes.Notes
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: note
        description: Keep a text.
        parameters:
          type: object
          properties:
            text: {type: string, description: The text.}
          required: [text]
"""


def verl_tools(folder: Path) -> EnvironmentSource:
    """Writes them into a folder, which has to be on the path of modules."""
    (folder / "verl_notes.py").write_text(CLASSES)
    functions, config = folder / "functions.py", folder / "tools.yaml"
    functions.write_text(FUNCTIONS)
    config.write_text(CONFIG)
    return EnvironmentSource(function_tool_path=str(functions), tool_config_path=str(config))
