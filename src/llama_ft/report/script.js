"use strict";
// What lies under the pointer, of every plot; without JavaScript only this is missing.
for (const figure of document.querySelectorAll("[data-plot]")) {
  const plot = JSON.parse(figure.dataset.plot);
  const svg = figure.querySelector("svg"), cross = svg.querySelector(".cross");
  const [left, right, top, bottom] = plot.box, [low, high] = plot.x;
  const note = document.createElement("div");
  note.className = "note";
  note.hidden = true;
  figure.append(note);

  const show = (event) => {
    const drawn = svg.getBoundingClientRect(), own = figure.getBoundingClientRect();
    const x = ((event.clientX - drawn.left) / drawn.width) * svg.viewBox.baseVal.width;
    const wanted = low + ((x - left) / (right - left)) * (high - low);
    const lines = [];
    let nearest = NaN;
    for (const one of plot.series) {
      let best = 0;
      one.x.forEach((value, n) => { if (Math.abs(value - wanted) < Math.abs(one.x[best] - wanted)) best = n; });
      if (lines.length === 0) nearest = one.x[best];
      const far = Math.abs(one.x[best] - nearest) > (high - low) / 20;
      if (!far) lines.push(plot.series.length > 1 ? `${one.name}: ${one.text[best]}` : one.text[best]);
    }
    lines.unshift(`step ${nearest.toLocaleString("en")}`);
    note.replaceChildren(...lines.map((line) => Object.assign(document.createElement("div"), { textContent: line })));
    note.hidden = false;
    const place = left + ((nearest - low) / (high - low)) * (right - left);
    const there = drawn.left - own.left + (place / svg.viewBox.baseVal.width) * drawn.width;
    const room = own.width - note.offsetWidth - 4;
    note.style.left = `${Math.max(4, Math.min(room, there > own.width / 2 ? there - note.offsetWidth - 10 : there + 10))}px`;
    note.style.top = `${drawn.top - own.top + 6}px`;
    for (const [name, value] of Object.entries({ x1: place, x2: place, y1: top, y2: bottom })) cross.setAttribute(name, value);
    cross.style.visibility = "visible";
  };
  const hide = () => { note.hidden = true; cross.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
