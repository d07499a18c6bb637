"""On which line of a `config.pbtxt` a field stands: protobuf's parser keeps no lines of what it has understood."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>\#[^\n]*)|(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<word>[-+.\w]+)|(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
_IGNORED = re.compile(r"#\s*modelyard:\s*ignore=([\w-]+(?:\s*,\s*[\w-]+)*)")

# Fields by which one of several messages is told from the others.
_NAMES = ("key", "name", "model_name")


@dataclass
class Node:
    """A field of the text, with whatever stands in its braces."""

    name: str
    line: int
    value: str = ""
    children: list["Node"] = field(default_factory=list)

    def find_all(self, name: str) -> list["Node"]:
        """Return the fields of that name, in the order of the text."""
        return [child for child in self.children if child.name == name]


def scan(text: str) -> Node:
    """Return the fields of a text, as far as its braces can be followed; never fails."""
    root = Node("", 1)
    # Open messages, and the list that each of them stands in.
    open_nodes: list[tuple[Node, Node | None]] = [(root, None)]
    pending: Node | None = None
    listed: Node | None = None
    line = 1
    awaits_value = False
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        holder = open_nodes[-1][0]
        if kind in ("space", "comment"):
            pass
        elif token in ("{", "<") and (pending or listed):
            node = Node((pending or listed or root).name, line)
            if pending:
                node.line = pending.line
            holder.children.append(node)
            open_nodes.append((node, listed))
            pending, listed, awaits_value = None, None, False
        elif token in ("}", ">"):
            if len(open_nodes) > 1:
                listed = open_nodes.pop()[1]
            pending, awaits_value = None, False
        elif token == "[":
            listed, pending, awaits_value = pending, None, False
        elif token == "]":
            listed = None
        elif token == ":":
            awaits_value = pending is not None
        elif kind in ("word", "string") and (awaits_value or listed):
            name = pending or listed or root
            holder.children.append(Node(name.name, line, value=token.strip("\"'")))
            pending, awaits_value = None, False
        elif kind == "word":
            pending = Node(token, line)
        line += token.count("\n")
    return root


def find_line(root: Node, *path: str | int) -> int:
    """Return the line of a field, or of the innermost message around it that is there.

    Args:
        root: What `scan` returned.
        path: Names of fields; behind one of them may stand which of several it is, from 0, or `=NAME` for the one
            whose `name` or `key` is NAME.
    """
    node = root
    parts = list(path)
    while parts:
        name = str(parts.pop(0))
        found = node.find_all(name)
        which = parts.pop(0) if parts and (isinstance(parts[0], int) or parts[0].startswith("=")) else 0
        if isinstance(which, str):
            found = [each for each in found if which[1:] in (k.value for n in _NAMES for k in each.find_all(n))]
            which = 0
        if which >= len(found):
            return node.line
        node = found[which]
    return node.line


def find_ignored(text: str) -> Iterator[tuple[str, int]]:
    """Yield the rules that comments of the form `# modelyard: ignore=RULE,RULE` name, with their lines."""
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _IGNORED.finditer(line):
            for rule in match[1].split(","):
                yield rule.strip(), number
