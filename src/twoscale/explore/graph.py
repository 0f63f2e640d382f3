"""The permutation of a hops problem as SVG: its cycles, and the walk of one query on them.

Every element of step k carries data-k (drawn from step k on) or data-only (drawn at step k alone); task.js shows and hides them.
As written here the whole walk is drawn.
"""

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence

from twoscale.explore.hops import Move
from twoscale.explore.layout import NODE, Cycle, Layout, lay_out
from twoscale.report.style import step_colour, step_share

GAP = 3.0  # between a node and the edges that touch it
HEAD = 9.0  # length of an arrow's head
LAP = 3.0  # how much wider a line is drawn for each later walk over the same edge
WIDTH = 5.0
SELF_LOOP = 13.0  # radius of a fixed point's edge
LABELS = 3  # numbers of steps beside one node, before they are shortened

Colour = Callable[[int], str]


def line_colour(loops: Sequence[int]) -> Colour:
    """The colour of a token that leaves the last group after step k, opaque."""
    return lambda k: step_colour(step_share((k,), loops[-1:]), "")


def graph_svg(f: Sequence[int], start: int, target: int, moves: Sequence[Move], loops: Sequence[int]) -> str:
    """The graph of f with the walk from `start`; `target` is the true answer."""
    layout, colour = lay_out(f), line_colour(loops)
    edges = "".join(_edge(cycle, i, "edge", "") for cycle in layout.cycles for i in range(len(cycle.nodes)))
    title = f"the permutation as a graph of {len(f)} nodes; the walk of the query begins at node {start}"
    return (
        f"<svg class='graph' viewBox='0 0 {layout.width:.0f} {layout.height:.0f}' role='img' aria-label='{html.escape(title)}' "
        f"style='max-width:{1.5 * layout.width:.0f}px'>"
        f"{edges}{_walked(layout, moves, colour)}{_nodes(layout, f, start, target, moves, colour)}</svg>"
    )


def _walked(layout: Layout, moves: Sequence[Move], colour: Colour) -> str:
    """Lines of the walk. Where an edge is walked more than once, the earlier line is the wider one, so that all can be seen."""
    hops = [m.start for m in moves if m.kind == "hop"]
    left, parts = Counter(hops), []
    for move in moves:
        about = f" data-k='{move.k}' data-from='{move.start}' data-to='{move.end}' style='--line:{colour(move.k)};--width:"
        if move.kind == "hop" and move.start is not None:
            cycle, i = layout.find(move.start)
            left[move.start] -= 1
            width = WIDTH + LAP * min(2, left[move.start])
            parts.append(_edge(cycle, i, "hop", f"{about}{width:.0f}'"))
        elif move.kind == "jump" and move.start is not None and move.end is not None:
            parts.append(_chord(layout.place(move.start), layout.place(move.end), f"{about}{WIDTH:.0f}'"))
    return "".join(parts)


def _edge(cycle: Cycle, i: int, kind: str, attributes: str) -> str:
    """The edge from node i of a cycle to the next one: an arc with a head."""
    if len(cycle.nodes) == 1:
        return _self_loop(cycle, kind, attributes)
    trim = (NODE + GAP) / cycle.radius
    begin, end = cycle.angle(i) + trim, cycle.angle(i + 1) - trim
    neck = end - 0.8 * HEAD / cycle.radius
    (x0, y0), (x1, y1), tip = cycle.point(begin), cycle.point(neck), cycle.point(end)
    path = f"M{x0:.1f} {y0:.1f}A{cycle.radius:.1f} {cycle.radius:.1f} 0 0 1 {x1:.1f} {y1:.1f}"
    return f"<g class='{kind}'{attributes}><path class='line' pathLength='1' d='{path}'/>{_head(tip, (end + neck) / 2 + math.pi / 2)}</g>"


def _self_loop(cycle: Cycle, kind: str, attributes: str) -> str:
    """The edge of a fixed point, above it."""
    x, y = cycle.x, cycle.y - NODE
    path = f"M{x - 8:.1f} {y - 1:.1f}A{SELF_LOOP} {SELF_LOOP} 0 1 1 {x + 11:.1f} {y - 4:.1f}"
    return f"<g class='{kind}'{attributes}><path class='line' pathLength='1' d='{path}'/>{_head((x + 7.0, y + 1.0), 2.1)}</g>"


def _chord(a: tuple[float, float], b: tuple[float, float], attributes: str) -> str:
    """A straight line between two nodes that no edge joins."""
    apart = math.dist(a, b)
    ux, uy = (b[0] - a[0]) / apart, (b[1] - a[1]) / apart
    off = NODE + GAP
    tip = b[0] - off * ux, b[1] - off * uy
    path = f"M{a[0] + off * ux:.1f} {a[1] + off * uy:.1f}L{tip[0] - 0.8 * HEAD * ux:.1f} {tip[1] - 0.8 * HEAD * uy:.1f}"
    return f"<g class='jump'{attributes}><path class='line' d='{path}'/>{_head(tip, math.atan2(uy, ux))}</g>"


def _head(tip: tuple[float, float], direction: float) -> str:
    """An arrow's head that ends at `tip`."""
    sides = [(tip[0] - HEAD * math.cos(direction + turn), tip[1] - HEAD * math.sin(direction + turn)) for turn in (0.5, -0.5)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, *sides))
    return f"<polygon class='head' points='{points}'/>"


def _nodes(layout: Layout, f: Sequence[int], start: int, target: int, moves: Sequence[Move], colour: Colour) -> str:
    """Nodes in the colour of their last visit, with the steps after which they are read."""
    parts = []
    for node in range(len(f)):
        x, y = layout.place(node)
        visits = [m.k for m in moves if m.end == node]
        at = f"cx='{x:.1f}' cy='{y:.1f}'"
        kind = "node" + " start" * (node == start) + " target" * (node == target)
        inside = f"<circle class='back' {at} r='{NODE}'/>"
        for k in visits:  # the newest covers those before it
            fill = f"<circle class='paper' {at} r='{NODE}'/><circle class='tint' {at} r='{NODE}'/>"
            inside += f"<g class='visit' data-k='{k}' style='--line:{colour(k)}'>{fill}</g>"
            hidden = " off" * (k != len(moves))
            inside += f"<circle class='here{hidden}' data-only='{k}' {at} r='{NODE + 4}' style='--line:{colour(k)}'/>"
        inside += f"<circle class='begin' {at} r='{NODE}'/>" if node == start else ""
        inside += f"<circle class='goal' {at} r='{NODE - 3.5}'/>" if node == target else ""
        inside += f"<text class='name' x='{x:.1f}' y='{y:.1f}'>{node}</text>"
        parts.append(f"<g class='{kind}' data-node='{node}'>{inside}{_labels(layout, node, visits, len(moves))}</g>")
    return "".join(parts)


def _labels(layout: Layout, node: int, visits: Sequence[int], leaves: int) -> str:
    """The numbers of the steps beside a node, outside its cycle; a star at the step after which the token left."""
    if not visits:
        return ""
    cycle, i = layout.find(node)
    angle = cycle.angle(i) if len(cycle.nodes) > 1 else math.pi / 2
    x, y = cycle.point(angle, cycle.radius + NODE + 15)
    anchor = "middle" if abs(math.cos(angle)) < 0.35 else "start" if math.cos(angle) > 0 else "end"
    x += {"start": -6, "end": 6, "middle": 0}[anchor]
    words = [f"<tspan data-k='{k}'>{' · ' * (n > 0)}{k}{'★' * (k == leaves)}</tspan>" for n, k in enumerate(visits)]
    if len(words) > LABELS:
        words = [words[0], f"<tspan data-k='{visits[1]}'> … </tspan>", words[-1].replace(" · ", "")]
    return f"<text class='steps' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{''.join(words)}</text>"
