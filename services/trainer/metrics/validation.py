"""What a validation reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Example:
    """One validation response for readers."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Validation numbers of one version, with standard errors of the metrics over prompts."""

    metrics: Mapping[str, float]
    examples: tuple[Example, ...]
    generated_tokens: int
    standard_errors: Mapping[str, float] = field(default_factory=dict)
