"""The prefix index: a tree of full pages, looked up by their token ids.

A node is a page whose ids follow those of its parent. Nodes are looked up by (parent, ids) in a dict, which compares
the ids, so two prefixes share a page only if they are equal. Removing a node removes its descendants, and numbers of
nodes are never reused: a lookup always finds a whole prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ROOT = 0
LOST = -1  # a sequence's node that was removed


@dataclass(slots=True)
class Node:
    page: int
    parent: int
    ids: bytes
    children: set[int] = field(default_factory=set)


class PrefixIndex:
    """The tree. Reference counts and free pages are in `Pool`.

    >>> index = PrefixIndex(pages=8)
    >>> node = index.add(ROOT, b"some ids", page=5)
    >>> index.find(ROOT, b"some ids") == node, index.find(ROOT, b"others")
    (True, None)
    """

    def __init__(self, pages: int) -> None:
        self.node_of = np.zeros(pages, dtype=np.int64)  # the node of each page; 0: none
        self.nodes: dict[int, Node] = {}
        self._by_ids: dict[tuple[int, bytes], int] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, parent: int, ids: bytes) -> int | None:
        return self._by_ids.get((parent, ids))

    def add(self, parent: int, ids: bytes, page: int) -> int:
        """Adds a node for `page`, unless there is one for these ids; returns the node."""
        if (known := self.find(parent, ids)) is not None:
            return known
        number = self._next
        self.restore(number, parent, ids, page)
        return number

    def restore(self, number: int, parent: int, ids: bytes, page: int) -> None:
        """Adds a node with a given number; its parent must exist."""
        self._next = max(self._next, number + 1)
        self.nodes[number] = Node(page, parent, ids)
        self._by_ids[parent, ids] = number
        self.node_of[page] = number
        if parent != ROOT:
            self.nodes[parent].children.add(number)

    def holds(self, node: int) -> bool:
        return node == ROOT or node in self.nodes

    def above(self, node: int, steps: int) -> int:
        """The ancestor `steps` pages above this node."""
        for _ in range(steps):
            if node not in self.nodes:
                return LOST
            node = self.nodes[node].parent
        return node

    def drop(self, node: int) -> list[int]:
        """Removes a node and its descendants, and returns their pages."""
        parent = self.nodes[node].parent
        if parent != ROOT:
            self.nodes[parent].children.discard(node)
        pages, left = [], [node]
        while left:
            number = left.pop()
            gone = self.nodes.pop(number)
            del self._by_ids[gone.parent, gone.ids]
            self.node_of[gone.page] = 0
            pages.append(gone.page)
            left.extend(gone.children)
        return pages
