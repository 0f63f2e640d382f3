// The report: plots are drawn when they come near, in the colours of the page; legends and links work without any server.
const lighter = (colour) => {  // dark colours would be lost on a dark page: black becomes white, the others go half way
  const rgb = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  const light = 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2], share = light === 0 ? 1 : light < 75 ? 0.45 : 0;
  return '#' + rgb.map((v) => Math.round(v + (255 - v) * share).toString(16).padStart(2, '0')).join('');
};
const dark = matchMedia('(prefers-color-scheme: dark)');
const drawn = new Map();  // place -> the figure that is drawn there
const draw = (source) => {
  const look = getComputedStyle(document.documentElement), pick = (name) => look.getPropertyValue(name).trim();
  const text = dark.matches ? source.textContent.replace(/#[0-9a-f]{6}/gi, lighter) : source.textContent;
  const figure = JSON.parse(text), layout = figure.layout, before = drawn.get(source.dataset.for);
  Object.assign(layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)'});
  layout.font = {...layout.font, color: pick('--ink')};
  for (const key of [...Object.keys(layout), 'xaxis', 'yaxis'])
    if (/^[xy]axis[0-9]*$/.test(key))
      layout[key] = {...layout[key], gridcolor: pick('--line'), zerolinecolor: pick('--line'), linecolor: pick('--soft')};
  if (before) figure.data.forEach((trace, i) => { trace.visible = before.data[i].visible; });
  drawn.set(source.dataset.for, figure);
  Plotly.react(source.dataset.for, figure.data, layout, {responsive: true, displayModeBar: false});
};
const seen = new IntersectionObserver((entries) => {  // a plot is drawn when it comes near: folded sections cost nothing
  for (const entry of entries) {
    const source = document.querySelector(`script[data-for="${entry.target.id}"]`);
    if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(source);
  }
}, {rootMargin: '600px'});
document.querySelectorAll('.plot').forEach((place) => seen.observe(place));
const colours = () => document.querySelectorAll('[data-colour]').forEach((e) => {
  e.style[e.classList.contains('dot') ? 'borderColor' : 'borderTopColor'] = dark.matches ? lighter(e.dataset.colour) : e.dataset.colour;
});
colours();
dark.addEventListener('change', () => {
  colours();
  drawn.forEach((_, name) => draw(document.querySelector(`script[data-for="${name}"]`)));
});
document.addEventListener('click', (event) => {  // a name in a legend shows or hides its curve in all panels of the figure
  const key = event.target.closest('.key');
  if (!key) return;
  const off = key.classList.toggle('off');
  key.closest('.figure').querySelectorAll('.plot').forEach((place) => {
    const source = document.querySelector(`script[data-for="${place.id}"]`);
    if (!drawn.has(place.id)) draw(source);
    const figure = drawn.get(place.id);
    const mine = figure.data.flatMap((t, i) => t.name === key.dataset.name || t.legendgroup === key.dataset.name ? [i] : []);
    mine.forEach((i) => { figure.data[i].visible = !off; });
    if (mine.length) Plotly.restyle(place.id, {visible: !off}, mine);
  });
});
const open = () => {  // a link opens the section that it leads to
  const name = decodeURIComponent(location.hash.slice(1));
  if (name === 'all') {
    document.querySelectorAll('details.part').forEach((part) => { part.open = true; });
    document.querySelectorAll('script[data-for]').forEach((source) => { if (!drawn.has(source.dataset.for)) draw(source); });
  }
  const target = name && document.getElementById(name);
  if (target && target.matches('details')) { target.open = true; target.scrollIntoView(); }
};
addEventListener('hashchange', open);
open();
