"""The few names of verl that files of tools import, for machines without verl.

`provide` puts them where ``from verl.tools... import ...`` finds them. Nothing else of verl's
exists; a file that imports more of it needs verl installed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


class ToolSchema:
    """A schema in OpenAI's form, whose keys are attributes, too."""

    def __init__(self, **values: object) -> None:
        self._values = values

    @classmethod
    def model_validate(cls, values: Mapping[str, object]) -> ToolSchema:
        """Return the schema of a mapping."""
        return cls(**values)

    def model_dump(self, **_options: object) -> dict[str, Any]:
        """Return the mapping."""
        return copy.deepcopy(self._values)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any JSON value
        try:
            value = self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None
        return ToolSchema(**value) if isinstance(value, dict) else value


@dataclass
class ToolResponse:
    """What a tool returns to the policy."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


@dataclass
class FunctionTool:
    """A registered function; without a schema it follows from the function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: ToolSchema | None


class BaseTool:
    """The base class of verl's tools with state."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:  # noqa: ANN401  duck type
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:  # noqa: ANN401  duck type
        """Return the schema."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_kwargs: Any) -> tuple[str, Any]:  # noqa: ANN401
        """Begin an episode."""
        return instance_id or "", ToolResponse()

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        **_kwargs: Any,  # noqa: ANN401
    ) -> tuple[Any, float, dict[str, Any]]:
        """Make a call."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **_kwargs: Any) -> float:  # noqa: ANN401
        """Return a reward, which sluice does not ask for."""
        return 0.0

    async def release(self, instance_id: str, **_kwargs: Any) -> None:  # noqa: ANN401
        """End an episode."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:  # noqa: ANN401  two forms
    """Register a function as a tool; both forms of verl's decorator."""

    def register(function: Callable[..., Any], own_name: str | None) -> Callable[..., Any]:
        tool_name = own_name or function.__name__
        registered = FUNCTION_TOOL_REGISTRY.get(tool_name)
        if registered is not None and registered.fn is not function:
            raise ValueError(f"two function tools are named {tool_name}; rename one")
        tool_schema = ToolSchema.model_validate(schema) if isinstance(schema, dict) else schema
        FUNCTION_TOOL_REGISTRY[tool_name] = FunctionTool(tool_name, function, tool_schema)
        return function

    if callable(name) and schema is None:
        return register(name, None)
    return lambda function: register(function, name)


def _unchanged(value: Any) -> Any:  # noqa: ANN401  a decorator
    return value


_MODULES: Mapping[str, Mapping[str, object]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.function_tool": {
        "function_tool": function_tool,
        "FunctionTool": FunctionTool,
        "FUNCTION_TOOL_REGISTRY": FUNCTION_TOOL_REGISTRY,
    },
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.schemas": {
        "OpenAIFunctionToolSchema": ToolSchema,
        "OpenAIFunctionSchema": ToolSchema,
        "OpenAIFunctionParametersSchema": ToolSchema,
        "OpenAIFunctionPropertySchema": ToolSchema,
        "ToolResponse": ToolResponse,
    },
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": _unchanged},
}


def provide() -> None:
    """Make the names importable, unless verl is installed."""
    if "verl" in sys.modules or find_spec("verl") is not None:
        return
    for path, names in _MODULES.items():
        module = ModuleType(path)
        module.__path__ = []
        vars(module).update(names)
        sys.modules[path] = module
        parent, _, child = path.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
