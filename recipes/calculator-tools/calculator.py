import re


class Calculator:
    def reset(self, prompt, ground_truth, **row):
        self.truth = ground_truth

    def calc(self, expression: str) -> str:
        """Evaluate arithmetic, such as 47 * 38."""
        if not re.fullmatch(r"[0-9.()+*/ -]{1,80}", expression) or "**" in expression:
            raise ValueError("write numbers, brackets and + - * /, at most 80 characters")
        return str(eval(expression))

    def score(self, answer: str) -> float:
        return float(answer.strip() == self.truth)
