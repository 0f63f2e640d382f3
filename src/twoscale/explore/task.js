// The walk on the task page: shows and hides what the server has drawn. `element`, `watch` and `trigger` are Gradio's.
let timer = null;
const last = () => Number(element.querySelector('[data-last]')?.dataset.last ?? 0);
const show = (now) => {
  element.querySelectorAll('[data-k]').forEach((e) => e.classList.toggle('off', Number(e.dataset.k) > now));
  element.querySelectorAll('[data-only]').forEach((e) => e.classList.toggle('off', Number(e.dataset.only) !== now));
  const range = element.querySelector('input[type=range]');
  if (range) range.value = now;
};
const stop = () => { clearInterval(timer); timer = null; };
const play = () => {
  stop();
  let now = 0;
  show(now);
  timer = setInterval(() => { now += 1; show(now); if (now >= last()) stop(); }, 550);
};
element.addEventListener('input', (event) => { if (event.target.matches('input[type=range]')) { stop(); show(Number(event.target.value)); } });
const pick = (event) => {
  const step = event.target.closest('[data-step]');
  if (step) { stop(); show(Number(step.dataset.step)); }
};
element.addEventListener('keydown', (event) => { if (event.key === 'Enter') pick(event); });
element.addEventListener('click', (event) => { if (event.target.closest('.play')) play(); else pick(event); });
const begin = () => { if (window.matchMedia('(prefers-reduced-motion: reduce)').matches) { stop(); show(last()); } else play(); };
watch('value', begin);
begin();
