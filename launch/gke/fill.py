"""Fills a template: fill.py FILE NAME=TEXT ... NAME:=JSON ... LIST -- TEXT ...

`$NAME` in the file becomes the value as JSON on one line, which can stand anywhere in YAML; LIST is the name of the
list that follows. Fails on a name without a value. Only the standard library: this runs where jobs are submitted from.
"""

import json
import string
import sys
from pathlib import Path


def main(file: str, *words: str) -> None:
    """Prints the filled template."""
    end = words.index("--")
    values = {words[end - 1]: list(words[end + 1 :])}
    for word in words[: end - 1]:
        name, _, value = word.partition("=")
        values[name.rstrip(":")] = json.loads(value) if name.endswith(":") else value
    as_json = {name: json.dumps(value) for name, value in values.items()}
    print(string.Template(Path(file).read_text()).substitute(as_json), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
