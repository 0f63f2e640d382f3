"""Style and scripts of the explorer's pages. Nothing is fetched from elsewhere."""

from pathlib import Path

_FOLDER = Path(__file__).parent
WALK_JS = (_FOLDER / "task.js").read_text("utf-8")
CSS = (_FOLDER / "text.css").read_text("utf-8") + (_FOLDER / "task.css").read_text("utf-8")
DARK = "() => document.body.classList.toggle('dark')"

# The address of a page says what is on it: every setting by its name, in the order of its controls.
_ADDRESS = """
(...values) => {
  const words = new URLSearchParams(), theme = new URLSearchParams(location.search).get('__theme');
  NAMES.forEach((name, i) => words.set(name, values[i] ?? 0));
  if (theme) words.set('__theme', theme);
  history.replaceState(null, '', location.pathname + '?' + words);
}
"""
ADDRESS = _ADDRESS.replace("NAMES", "['prompt', 'rule', 'power', 'loops', 'kv', 'new', 'temperature', 'seed', 'speculate']")
TASK_ADDRESS = _ADDRESS.replace("NAMES", "['sample', 'seed', 'rule', 'power', 'loops']")

CLICK = """
const chosen = (event) => {
  const token = event.target.closest('[data-i]');
  if (token && (event.type === 'click' || event.key === 'Enter')) trigger('click', {index: Number(token.dataset.i)});
};
element.addEventListener('click', chosen);
element.addEventListener('keydown', chosen);
"""
