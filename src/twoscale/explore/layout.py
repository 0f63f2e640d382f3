"""Where the nodes of a permutation are drawn: each cycle on a circle, the circles packed side by side. Units are pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

NODE = 17.0  # radius of a node
SPACING = 62.0  # between neighbours on a cycle
MARGIN = 30.0  # around a cycle, for the numbers of the steps
ASPECT = 1.3  # width to height that the packing aims at
NEAREST = 12  # circles that a new one may touch


@dataclass(frozen=True)
class Cycle:
    """One cycle: its nodes in the order of f, clockwise from the top."""

    nodes: tuple[int, ...]
    x: float
    y: float
    radius: float

    def angle(self, i: float) -> float:
        """Of node number i of this cycle."""
        return 2 * math.pi * i / len(self.nodes) - math.pi / 2

    def point(self, angle: float, radius: float | None = None) -> tuple[float, float]:
        r = self.radius if radius is None else radius
        return self.x + r * math.cos(angle), self.y + r * math.sin(angle)


@dataclass(frozen=True)
class Layout:
    cycles: tuple[Cycle, ...]
    width: float
    height: float

    def find(self, node: int) -> tuple[Cycle, int]:
        """The cycle of a node and its number there."""
        cycle = next(c for c in self.cycles if node in c.nodes)
        return cycle, cycle.nodes.index(node)

    def place(self, node: int) -> tuple[float, float]:
        cycle, i = self.find(node)
        return cycle.point(cycle.angle(i))


def cycles_of(f: Sequence[int]) -> list[tuple[int, ...]]:
    """The cycles of a permutation, the longest first; each begins at its smallest node."""
    seen: set[int] = set()
    found = []
    for first in range(len(f)):
        cycle, node = list[int](), first
        while node not in seen:
            seen.add(node)
            cycle.append(node)
            node = f[node]
        if cycle:
            found.append(tuple(cycle))
    return sorted(found, key=lambda c: (-len(c), c[0]))


def lay_out(f: Sequence[int]) -> Layout:
    """Every node has a place of its own, and no two cycles overlap."""
    cycles = cycles_of(f)
    radii = [0.0 if len(c) == 1 else SPACING / (2 * math.sin(math.pi / len(c))) for c in cycles]
    sizes = [r + NODE + MARGIN for r in radii]
    places = _pack(sizes)
    left, top = (min(at[i] - size for at, size in zip(places, sizes, strict=True)) for i in (0, 1))
    right, bottom = (max(at[i] + size for at, size in zip(places, sizes, strict=True)) for i in (0, 1))
    drawn = tuple(Cycle(c, x - left, y - top, r) for c, (x, y), r in zip(cycles, places, radii, strict=True))
    return Layout(drawn, right - left, bottom - top)


def _pack(sizes: Sequence[float]) -> list[tuple[float, float]]:
    """Centres of circles with these radii, largest first: each touches two earlier ones where the whole stays smallest."""
    places: list[tuple[float, float]] = []
    for n, size in enumerate(sizes):
        if not places:
            places.append((0.0, 0.0))
            continue
        near = range(max(0, n - NEAREST), n)
        touching = [(max(x + r for (x, _), r in zip(places, sizes, strict=False)) + size, 0.0)]  # right of all: always free
        touching += [(places[i][0] + sizes[i] + size, places[i][1]) for i in near]
        touching += [(places[i][0], places[i][1] + sizes[i] + size) for i in near]
        for i in near:
            for j in near:
                if i < j:
                    touching += _tangent(places[i], sizes[i] + size, places[j], sizes[j] + size)
        free = [at for at in touching if _is_free(at, size, places, sizes)]
        places.append(min(free, key=lambda at: _extent([*places, at], sizes)))
    return places


def _is_free(at: tuple[float, float], size: float, places: Sequence[tuple[float, float]], sizes: Sequence[float]) -> bool:
    return all(math.dist(at, other) >= size + theirs - 1e-6 for other, theirs in zip(places, sizes, strict=False))


def _extent(places: Sequence[tuple[float, float]], sizes: Sequence[float]) -> float:
    """Height of the smallest frame of the wanted shape around the circles, and a little for the distance from the first."""
    spans = []
    for i in (0, 1):
        sides = [(at[i] - size, at[i] + size) for at, size in zip(places, sizes, strict=False)]
        spans.append(max(high for _, high in sides) - min(low for low, _ in sides))
    return max(spans[0] / ASPECT, spans[1]) + 1e-3 * math.dist(places[0], places[-1])


def _tangent(a: tuple[float, float], ra: float, b: tuple[float, float], rb: float) -> list[tuple[float, float]]:
    """The points at distance ra from a and rb from b."""
    apart = math.dist(a, b)
    if not abs(ra - rb) <= apart <= ra + rb:
        return []
    along = (ra**2 - rb**2 + apart**2) / (2 * apart)
    across = math.sqrt(max(0.0, ra**2 - along**2))
    ux, uy = (b[0] - a[0]) / apart, (b[1] - a[1]) / apart
    x, y = a[0] + along * ux, a[1] + along * uy
    return [(x - across * uy, y + across * ux), (x + across * uy, y - across * ux)]
