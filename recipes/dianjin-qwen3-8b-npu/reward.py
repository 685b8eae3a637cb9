"""The reward of the choice questions: 1 if the last box has the letters of the truth, else 0."""


def boxed_letters(text):
    """Return the letters A to G of the last box, sorted, each once; without a box, none."""
    _, box, rest = text.rpartition("\\boxed{")
    content, end, _ = rest.partition("}")
    if not (box and end):
        return ""
    return "".join(letter for letter in "ABCDEFG" if letter in content)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    letters = boxed_letters(solution_str)
    return float(bool(letters) and letters == ground_truth)
