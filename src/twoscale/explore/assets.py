"""Style and scripts of the explorer's pages. Nothing is fetched from elsewhere."""

from pathlib import Path

_FOLDER = Path(__file__).parent
WALK_JS = (_FOLDER / "task.js").read_text("utf-8")
TASK_CSS = (_FOLDER / "task.css").read_text("utf-8")

CLICK = """
const chosen = (event) => {
  const token = event.target.closest('[data-i]');
  if (token && (event.type === 'click' || event.key === 'Enter')) trigger('click', {index: Number(token.dataset.i)});
};
element.addEventListener('click', chosen);
element.addEventListener('keydown', chosen);
"""
