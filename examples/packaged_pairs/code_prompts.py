"""Prompts that ask for code: stubs to complete, and functions asked for in words.

Each prompt comes with its subject, and prompts are held out by subject. None is HumanEval's.
"""

from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

COMPLETE = "Complete this Python function:\n\n```python\n{}\n```"
"""How a stub is asked for, HumanEval's as well, on which the drafter is measured."""

# Which numbers to keep, what to make of each, and what to make of all: words and Python.
KEEP: list[tuple[str, str, Any]] = [
    ("", "numbers", lambda n: True),
    ("even", "even numbers", lambda n: n % 2 == 0),
    ("odd", "odd numbers", lambda n: n % 2 == 1),
    ("positive", "positive numbers", lambda n: n > 0),
    ("negative", "negative numbers", lambda n: n < 0),
    ("large", "numbers larger than ten", lambda n: n > 10),
    ("small", "numbers less than five", lambda n: n < 5),
    ("two_digit", "two-digit numbers", lambda n: 10 <= abs(n) < 100),
    ("thirds", "numbers divisible by three", lambda n: n % 3 == 0),
    ("distinct", "distinct numbers", None),
]
CHANGE: list[tuple[str, str, Any]] = [
    ("", "", lambda n: n),
    ("squared", "squares of the ", lambda n: n * n),
    ("doubled", "doubles of the ", lambda n: 2 * n),
    ("halved", "halves (rounded down) of the ", lambda n: n // 2),
    ("absolute", "absolute values of the ", abs),
    ("negated", "negations of the ", lambda n: -n),
    ("digit_sums", "sums of digits of the ", lambda n: sum(map(int, str(abs(n))))),
    ("cubed", "cubes of the ", lambda n: n**3),
    ("last_digits", "last digits of the ", lambda n: abs(n) % 10),
]
COLLECT: list[tuple[str, str, str, Any]] = [
    ("list", "List[int]", "a list of the {}, in their order", list),
    ("sum", "int", "the sum of the {}", sum),
    ("count", "int", "how many of the {} there are", len),
    ("largest", "int", "the largest of the {}, or 0 if there is none", lambda v: max(v, default=0)),
    ("smallest", "int", "the smallest of the {}, or 0 if none", lambda v: min(v, default=0)),
    ("sorted", "List[int]", "the {}, sorted from the smallest", sorted),
    ("reversed", "List[int]", "the {} in reverse order", lambda v: v[::-1]),
    ("any_above", "bool", "whether any of the {} is above 20", lambda v: any(n > 20 for n in v)),
    ("average", "float", "the mean of the {}", lambda v: sum(v) / len(v) if v else 0.0),
    ("running", "List[int]", "running totals of the {}", lambda v: [*accumulate(v)]),
]
TEXT: list[tuple[str, str, Any]] = [
    ("vowels", "the vowels of", lambda s: [c for c in s if c in "aeiou"]),
    (
        "consonants",
        "the consonants of",
        lambda s: [c for c in s if c.isalpha() and c not in VOWELS],
    ),
    ("words", "the words of", str.split),
    (
        "long_words",
        "the words of more than four letters in",
        lambda s: [word for word in s.split() if len(word) > 4],
    ),
    ("capitals", "the capital letters of", lambda s: [c for c in s if c.isupper()]),
    ("letters", "the letters of", lambda s: [c for c in s if c.isalpha()]),
    ("digits", "the digits of", lambda s: [c for c in s if c.isdigit()]),
    ("initials", "the first letters of the words of", lambda s: [w[0] for w in s.split()]),
    ("endings", "the last letters of the words of", lambda s: [w[-1] for w in s.split()]),
]
WITH_TEXT: list[tuple[str, str, str, Any]] = [
    ("count", "int", "Count {} a text.", len),
    ("joined", "str", "Join {} a text with dashes.", "-".join),
    ("unique", "List[str]", "List {} a text, each once, in order.", lambda v: [*dict.fromkeys(v)]),
    ("upper", "List[str]", "List {} a text in upper case.", lambda v: [w.upper() for w in v]),
    ("last", "str", "Return the last of {} a text, or an empty string.", lambda v: (v or [""])[-1]),
    (
        "counts",
        "Dict[str, int]",
        "Count how often each of {} a text occurs.",
        lambda v: {part: v.count(part) for part in v},
    ),
    ("sorted", "List[str]", "Sort {} a text by the alphabet.", sorted),
    ("palindrome", "bool", "Check if {} a text read the same backwards.", lambda v: v == v[::-1]),
    ("lengths", "List[int]", "List the lengths of {} a text.", lambda v: [len(w) for w in v]),
]
VOWELS = "aeiouAEIOU"
NUMBERS = [[3, -4, 12, 7, 7], [10, 25, 2, 9], [-8, 15, 30, 6, 1], [5, 5, 18, 21, -3, 44], [27, 4]]
TEXTS = [
    "The quick brown fox",
    "Room 42 is empty",
    "Never odd or even",
    "Green tea at 5",
    "level up",
]
NAMES = ["numbers", "values", "items", "data", "nums"]

TASKS = """reverses a string|checks if a number is prime|returns the nth Fibonacci number
computes the factorial of a number|merges two sorted lists|removes duplicates from a list
counts the words in a file|finds the longest word in a sentence|checks if two words are anagrams
converts Celsius to Fahrenheit|flattens a nested list|transposes a matrix|rotates a list by k places
finds the second largest number in a list|parses a CSV file into dictionaries
validates an email address|generates a random password|computes the greatest common divisor
converts a number to binary|converts a Roman numeral to an integer|counts the vowels in a string
implements binary search|implements bubble sort|implements quicksort|implements merge sort
reads a JSON file and prints its keys|groups words by their first letter|inverts a dictionary
finds the intersection of two lists|computes the dot product of two vectors|multiplies two matrices
checks if parentheses are balanced|finds all pairs that sum to a target|computes compound interest
returns the day of the week of a date|computes the median of a list|finds the mode of a list
splits a list into chunks|zips two lists into a dictionary|capitalizes every word in a sentence
computes the Hamming distance of two strings|compresses a string by counting repeats
finds the common prefix of a list of strings|sums the digits of a number
lists the divisors of a number|checks if a year is a leap year
converts seconds to hours, minutes and seconds
sorts a list of dictionaries by a key|removes punctuation from a text
encrypts a text with a Caesar cipher|computes the area of a circle
computes the distance between two points|counts lines in a file
downloads a web page|retries a function three times|measures how long a function takes
caches the results of a function|walks a directory and lists its files|replaces tabs with spaces
finds missing numbers in a range|shuffles a deck of cards|simulates rolling two dice
plays rock, paper, scissors|draws a triangle of stars|prints a multiplication table
converts a list of tuples to a dictionary|counts the frequency of characters
finds the shortest path in a grid|traverses a binary tree in order
inserts a node into a linked list|reverses a linked list
implements a stack|implements a queue with two stacks|finds cycles in a graph
performs breadth-first search|performs depth-first search|computes Pascal's triangle
solves the Tower of Hanoi|generates all permutations of a list|generates all subsets of a set
formats a number with thousands separators|computes a moving average|normalizes a list of numbers
clamps a value to a range|finds the longest increasing run|counts islands in a grid
parses command line arguments|writes a log line with a timestamp|reads environment variables
hashes a password|validates a credit card number|computes a checksum|converts hex to RGB
computes the body mass index|calculates a tip|applies a discount to a price|tracks an inventory
adds two fractions|evaluates a polynomial|finds the roots of a quadratic equation"""
HOW = [
    "Write a Python function that {}.",
    "Write a Python function that {}. Include a docstring and type hints.",
    "Write a Python function that {} and explain how it works.",
    "Write a Python function that {}, then show an example of its use.",
    "Can you show me Python code that {}?",
    "Write a short Python script that {}.",
    "Write a JavaScript function that {}.",
    "Write unit tests for a Python function that {}.",
    "Write a Python class with a method that {}.",
    "I need a function that {}. Please write it in Python without using any libraries.",
    "Write a Python function that {}. Handle invalid input by raising a ValueError.",
    "Implement in Python a function that {}. Only reply with code.",
    "What is an efficient way to write a function that {}? Show the code.",
    "Write a C function that {}.",
]


def stub(name: str, argument: str, kind: str, returns: str, about: str, examples: str) -> str:
    """Write a signature and a docstring with examples."""
    signature = f"def {name}({argument}: {kind}) -> {returns}:"
    imports = [one for one in ("Dict", "List") if f"{one}[" in signature]
    head = f"from typing import {', '.join(imports)}\n\n\n" if imports else ""
    return f'{head}{signature}\n    """{about}\n{examples}    """'


def stubs() -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of every function about numbers, then of every one about text."""
    for number, (keep, change, collect) in enumerate(product(KEEP, CHANGE, COLLECT)):
        name = "_".join(part for part in (collect[0], change[0], keep[0], "of") if part)
        argument = NAMES[number % len(NAMES)]
        what = collect[2].format(f"{change[1]}{keep[1]} in {argument}")
        examples = ""
        for start in range(1 + number % 3):
            given = NUMBERS[(number + start) % len(NUMBERS)]
            kept = [*dict.fromkeys(given)] if keep[2] is None else [n for n in given if keep[2](n)]
            answer = collect[3]([change[2](n) for n in kept])
            examples += f"    >>> {name}({given})\n    {answer!r}\n"
        text = stub(name, argument, "List[int]", collect[1], f"Return {what}.", examples)
        yield name, COMPLETE.format(text)
    for number, (part, made) in enumerate(product(TEXT, WITH_TEXT)):
        name = f"{part[0]}_{made[0]}"
        for style, ask in enumerate((COMPLETE, "Finish this function.\n\n{}\n")):
            sentence = TEXTS[(number + style) % len(TEXTS)]
            shown = made[3](part[2](sentence))
            examples = f"    >>> {name}({sentence!r})\n    {shown!r}\n"
            text = stub(name, "text", "str", made[1], made[2].format(part[1]), examples)
            yield name, ask.format(text)


def instructions() -> Iterator[tuple[str, str]]:
    """Yield subject and prompt of every task, asked for in every way."""
    for task in TASKS.replace("\n", "|").split("|"):
        for how in HOW:
            yield task, how.format(task)
