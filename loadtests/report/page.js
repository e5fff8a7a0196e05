// Shows the values of every line of a chart at the pointer.
for (const figure of document.querySelectorAll('figure[data-chart]')) {
  const {x: [left, right, low, high, log], units, series} = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector('svg'), cursor = figure.querySelector('.cursor'), tip = figure.querySelector('.tip');
  const place = v => left + (right - left) * (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
  svg.addEventListener('pointermove', e => {
    const box = svg.getBoundingClientRect(), px = (e.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let near = null;
    for (const [, xs] of series) for (const v of xs) if (near === null || Math.abs(place(v) - px) < Math.abs(place(near) - px)) near = v;
    if (near === null) return;
    cursor.setAttribute('x1', place(near)); cursor.setAttribute('x2', place(near)); cursor.style.visibility = 'visible';
    tip.replaceChildren();
    const head = document.createElement('div'); head.textContent = `${units[0]}: ${near}${units[1]}`; tip.append(head);
    for (const [name, xs, ys] of series) {
      let best = -1;
      xs.forEach((v, i) => { if (best < 0 || Math.abs(v - near) < Math.abs(xs[best] - near)) best = i; });
      if (best < 0 || ys[best] === null) continue;
      const row = document.createElement('div'); row.textContent = `${name}: ${ys[best]}${units[2]}`; tip.append(row);
    }
    tip.style.display = 'block';
    const at = e.clientX - figure.getBoundingClientRect().left;
    tip.style.left = Math.min(at + 14, figure.clientWidth - tip.offsetWidth - 6) + 'px'; tip.style.top = '40px';
  });
  svg.addEventListener('pointerleave', () => { cursor.style.visibility = 'hidden'; tip.style.display = 'none'; });
}
