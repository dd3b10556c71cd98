// What accessibility.py judges: gathered in the page. TARGET is the least size to hit, in pixels.
const shown = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest('[aria-hidden=true], .hidden');
const about = (e) => `<${e.tagName.toLowerCase()}${e.id ? ' id=' + e.id : ''}${e.className && e.className.baseVal === undefined ? ' class=' + e.className : ''}> ${(e.textContent || '').trim().slice(0, 30)}`;
const text = (ids) => ids.split(/\s+/).map((id) => (document.getElementById(id) || {}).textContent || '').join(' ').trim();
const name = (e) => {
  if (e.getAttribute('aria-labelledby')) return text(e.getAttribute('aria-labelledby'));
  if (e.getAttribute('aria-label')) return e.getAttribute('aria-label').trim();
  if (e.labels && e.labels.length) return [...e.labels].map((l) => l.textContent).join(' ').trim();
  if (e.tagName === 'IMG') return (e.getAttribute('alt') || '').trim();
  return (e.textContent || '').trim() || (e.getAttribute('title') || '').trim();
};
const all = [...document.querySelectorAll('*')];
const acts = all.filter((e) => e.matches('a[href], button, input, select, textarea, summary, [tabindex]:not([tabindex="-1"])') && shown(e));
const backs = (e) => { const found = []; for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; found.push(c); if (!/rgba\(.*, 0(\.\d+)?\)|transparent/.test(c)) break; } return found; };
const texts = [];
for (const e of all) {
  if (!shown(e) || e.closest('[disabled], option, datalist, script, style, title')) continue;
  const own = [...e.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim()).map((n) => n.textContent.trim()).join(' ');
  const typed = e.matches('input, textarea, select') ? 'typed' : '';
  if (!own && !typed) continue;
  const s = getComputedStyle(e), svg = e instanceof SVGElement;
  let from = e; while (from instanceof SVGElement && from.parentElement) from = from.parentElement;
  const box = e.getBoundingClientRect();
  if (!box.width || !box.height) continue;
  const flag = svg && e.classList.contains('flag-text');
  texts.push([about(e), svg ? s.fill : s.color, flag ? [getComputedStyle(document.querySelector('.flag')).fill] : backs(svg ? from : e), parseFloat(s.fontSize), Number(s.fontWeight)]);
}
return {
  lang: document.documentElement.lang, title: document.title,
  headings: all.filter((e) => /^H[1-6]$/.test(e.tagName) && e.checkVisibility()).map((e) => [e.tagName, e.textContent.trim()]),
  mains: document.querySelectorAll('main').length, navs: [...document.querySelectorAll('nav')].map(name),
  ids: all.filter((e) => e.id).map((e) => e.id),
  refs: all.flatMap((e) => ['aria-labelledby', 'aria-describedby', 'aria-activedescendant', 'for', 'list'].filter((a) => e.getAttribute(a)).flatMap((a) => e.getAttribute(a).split(/\s+/).map((id) => [about(e), a, id]))),
  roles: all.filter((e) => e.getAttribute('role')).map((e) => [about(e), e.getAttribute('role'), e.parentElement.closest('[role]')?.getAttribute('role') || '']),
  states: all.flatMap((e) => e.getAttributeNames().filter((a) => a.startsWith('aria-')).map((a) => [about(e), a, e.getAttribute(a)])),
  unnamed: acts.filter((e) => !name(e)).map(about),
  tabindex: acts.filter((e) => e.tabIndex > 0).map(about),
  nested: acts.filter((e) => e.matches('a, button') && e.parentElement.closest('a, button, summary')).map(about),
  images: all.filter((e) => (e.tagName === 'IMG' && !e.hasAttribute('alt')) || (e.tagName === 'svg' && e.getAttribute('aria-hidden') !== 'true' && !(e.getAttribute('role') === 'img' && e.getAttribute('aria-label')))).map(about),
  tables: all.filter((e) => e.tagName === 'TABLE' && e.checkVisibility() && (!e.querySelector('thead th') || [...e.querySelectorAll('th')].some((th) => !th.scope))).map(about),
  scrolls: all.filter((e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1 && e.checkVisibility() && e.tabIndex < 0 && !e.querySelector('a[href], button, input')).map(about),
  lists: all.filter((e) => e.tagName === 'LI' && !['UL', 'OL'].includes(e.parentElement.tagName)).map(about),
  small: acts.filter((e) => { const b = e.getBoundingClientRect(), inline = e.tagName === 'A' && getComputedStyle(e).display === 'inline'; return !inline && !e.matches('.skip') && (b.height < TARGET || b.width < TARGET); }).map((e) => about(e) + JSON.stringify(e.getBoundingClientRect())),
  styled: all.filter((e) => e.hasAttribute('onclick') || e.hasAttribute('onload') || e.hasAttribute('onerror')).map(about),
  texts,
};
