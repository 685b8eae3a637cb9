"""The same sums for inspect-ai."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def sums() -> Task:
    """The number after "Answer:" in what the model generates."""
    fields = FieldSpec(input="question", target="answer", id="id")
    return Task(
        dataset=json_dataset("rows.jsonl", fields),
        solver=generate(),
        scorer=pattern(r"Answer: (-?\d+)"),
    )
