"use strict";
// Show the values at the pointer, for every plot. Without JavaScript only this is missing.
for (const figure of document.querySelectorAll("[data-plot]")) {
  const plot = JSON.parse(figure.dataset.plot);
  const svg = figure.querySelector("svg"), cross = svg.querySelector(".cross");
  const [low, high] = plot.x;
  const note = document.createElement("div");
  note.className = "note";
  note.hidden = true;
  figure.append(note);

  const show = (event) => {
    const drawn = svg.getBoundingClientRect(), own = figure.getBoundingClientRect();
    const wanted = low + ((event.clientX - drawn.left) / drawn.width) * (high - low);
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
    const share = (nearest - low) / (high - low);
    const there = drawn.left - own.left + share * drawn.width;
    const room = own.width - note.offsetWidth - 4;
    note.style.left = `${Math.max(4, Math.min(room, there > own.width / 2 ? there - note.offsetWidth - 10 : there + 10))}px`;
    note.style.top = `${drawn.top - own.top + 6}px`;
    for (const end of ["x1", "x2"]) cross.setAttribute(end, share * svg.viewBox.baseVal.width);
    cross.style.visibility = "visible";
  };
  const hide = () => { note.hidden = true; cross.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
