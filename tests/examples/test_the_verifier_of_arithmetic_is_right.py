"""The example of a reward that can be verified."""

import doctest

from rlhf_examples.arithmetic import verifier
from rlhf_examples.arithmetic.verifier import score
from tests.each import each_case


def test_its_docstring_is_true() -> None:
    assert doctest.testmod(verifier).failed == 0
    assert doctest.testmod(verifier).attempted == 2


@each_case(
    ("prompt", "response", "expected"),
    [
        ("What is 17 - 20?", "It is -3.", 1.0),
        ("What is 17 - 20?", "It is 3.", 0.0),
        ("Compute -4 * -(2 + 1)", "12", 0.0),  # a minus before parentheses is no calculation that it knows
        ("Compute ( 4 + 2 ) * 3.", "= 18", 1.0),
        ("First 1 + 1, then 7 / 2 =", "3.5", 1.0),
        ("7 / 0 =", "0", 0.0),
        ("7 / 2 =", "7/0", 0.0),
        ("Hello?", "4", 0.0),
        ("007 + 1 =", "8", 0.0),
        ("((((((2 + 2", "4", 0.0),
        ("2 + 2 =", "", 0.0),
        ("2 + 2 =", "four", 0.0),
    ],
)
def test_the_last_number_of_the_response_counts(prompt: str, response: str, expected: float) -> None:
    assert score([prompt], [response], [True]) == [expected]


def test_what_a_right_answer_counts_is_an_argument() -> None:
    assert score(["1 + 1 ="], ["2"], [True], right=5.0) == [5.0]
