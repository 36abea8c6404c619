"""Tests of text_cleaning: tokens as StackOverflow's, and prose out of docstrings."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackoverflow_nwp import text_cleaning


def _joined(sentences: list[tuple[str, ...]]) -> list[str]:
    return [" ".join(tokens) for tokens in sentences]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Hello,  World!", "hello , world !"),
        ("It's a well-known front-end.", "it's a well-known front-end ."),
        ("you\u2019re right \u2014 na\u00efve", "you're right - nave"),
        ("a &lt; b &amp;&amp; c", "a < b & & c"),
        ("see https://example.org/a?b=c#d.", "see <URL> ."),
        ("call max_iter(x) in c#", "call max _ iter ( x ) in c #"),
        ("a\x00b\x1b c", "a b c"),
    ],
)
def test_tokenize(sentence: str, expected: str) -> None:
    assert " ".join(text_cleaning.tokenize(sentence)) == expected


@given(st.text())
def test_tokens_are_lower_case_ascii_without_white_space(text: str) -> None:
    for token in text_cleaning.tokenize(text):
        assert token == "<URL>" or re.fullmatch(r"[!-@\[-~]+", token)


def test_split_sentences_keeps_abbreviations_together() -> None:
    text = "Use it, e.g. When idle. See Fig. 3 of Smith et al. Then stop! Why? Because 1.5 is odd."
    assert text_cleaning.split_sentences(text) == [
        "Use it, e.g. When idle.",
        "See Fig. 3 of Smith et al. Then stop!",
        "Why?",
        "Because 1.5 is odd.",
    ]


def test_sentences_of_text() -> None:
    text = "One line\ncontinues here. Next one.\n\nA heading\n\n   \n\nLast."
    assert _joined(text_cleaning.sentences_of_text(text)) == [
        "one line continues here .",
        "next one .",
        "a heading",
        "last .",
    ]


def test_google_style() -> None:
    docstring = """Computes the mean of a tensor.

    It is slow for `large` inputs. See [the guide](https://example.org/guide).

    ```python
    x = compute_the_mean(of_this_tensor)
    ```

    Args:
      axis: The axis to reduce along,
        or none for all of them.
      name (Optional[str]): A name for the operation.

    Returns:
      A tensor of the same type.

    Raises:
      ValueError: If the axis is out of range.
    """
    assert _joined(text_cleaning.sentences_of_docstring(docstring)) == [
        "computes the mean of a tensor .",
        "it is slow for large inputs .",
        "see the guide .",
        "the axis to reduce along , or none for all of them .",
        "a name for the operation .",
        "a tensor of the same type .",
        "if the axis is out of range .",
    ]


def test_numpy_style() -> None:
    docstring = """Perform k-means clustering.

    Read more in the :ref:`User Guide <k_means>`.

    Parameters
    ----------
    X : {array-like, sparse matrix} of shape (n_samples, n_features)
        The observations to cluster.

    verbose : bool, default=False
        Whether to be verbose.

    See Also
    --------
    other_function : Does something else entirely.

    Examples
    --------
    The result is a list of numbers:

    >>> this_is_code(with_a, number_of, words)
    the output of the code

    References
    ----------
    .. [1] A. Author, "A very long title", Some Journal, 1999.
    """
    assert _joined(text_cleaning.sentences_of_docstring(docstring)) == [
        "perform k-means clustering .",
        "read more in the user guide .",
        "the observations to cluster .",
        "whether to be verbose .",
        "the result is a list of numbers :",
    ]


def test_restructured_text() -> None:
    docstring = """Sends a request with :meth:`~pool.Pool.urlopen` and waits.

    :param timeout: How long to wait for
        an answer.
    :type timeout: a float or an integer
    :returns: the answer of the server

    .. note:: This call is not safe in threads.

    .. code-block:: python

        this is code of the example

    What is literal follows, as it often does::

        more code of the example

    ======  ===========
    Name    What it is
    ======  ===========
    one     a first row
    ======  ===========

    - the first of two items
    - the second of two items
    """
    assert _joined(text_cleaning.sentences_of_docstring(docstring)) == [
        "sends a request with pool . pool . urlopen and waits .",
        "how long to wait for an answer .",
        "the answer of the server",
        "this call is not safe in threads .",
        "what is literal follows , as it often does :",
        "the first of two items",
        "the second of two items",
    ]


@pytest.mark.parametrize(
    "docstring",
    [
        "",
        "x = f(y) + g(z)",
        r"The sum is \(a + b\) for any number.",
        "a b c d e f",
    ],
)
def test_what_is_not_prose_is_dropped(docstring: str) -> None:
    assert text_cleaning.sentences_of_docstring(docstring) == []


@given(st.text(alphabet="ab :.\n`*-=>|_[]()#0Z\t", max_size=200))
def test_any_docstring_is_survived(docstring: str) -> None:
    for tokens in text_cleaning.sentences_of_docstring(docstring):
        assert text_cleaning.is_prose(tokens)
