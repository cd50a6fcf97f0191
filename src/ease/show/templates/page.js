"use strict";
// The slider of each entanglement spectrum: the page is drawn at one threshold, and this moves it.
// The figures are those of `forget_energy` and `retain_damage` in charts.py.

const spectra = JSON.parse(document.getElementById("spectra").textContent);

const goes = (block, delta) => block.cosines.map((cosine) => cosine <= delta);
const removed = (block, delta) =>
  block.energies.reduce((sum, energy, i) => (block.cosines[i] <= delta ? sum + energy : sum), 0);
const touched = (block, delta) => Math.max(0, ...block.cosines.filter((c) => c <= delta).map((c) => c * c));

function show(part, blocks, delta) {
  const at = delta.toFixed(2);
  part.querySelectorAll(".spectrum tbody tr").forEach((row, number) => {
    const block = blocks[number];
    const gone = goes(block, delta);
    row.querySelectorAll(".direction").forEach((dot, i) => dot.classList.toggle("goes", gone[i]));
    const cells = row.querySelectorAll("td");
    cells[0].textContent = `${gone.filter(Boolean).length} of ${gone.length}`;
    cells[1].textContent = removed(block, delta).toFixed(2);
    cells[2].textContent = touched(block, delta).toFixed(2);
  });
  const all = blocks.flatMap((block) => goes(block, delta));
  const etaF = blocks.reduce((sum, block) => sum + removed(block, delta), 0) / blocks.length;
  const etaR = Math.max(...blocks.map((block) => touched(block, delta)));
  part.querySelectorAll(".threshold").forEach((line) => {
    const x = Number(line.dataset.from) + Number(line.dataset.width) * delta;
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
  });
  for (const [name, value] of [["removed", etaF], ["touched", etaR]]) {
    const dot = part.querySelector(`.at-${name}`);
    dot.setAttribute("cx", Number(dot.dataset.from) + Number(dot.dataset.width) * delta);
    dot.setAttribute("cy", Number(dot.dataset.bottom) - Number(dot.dataset.height) * value);
  }
  part.querySelector(".chart desc").textContent =
    `At delta ${at}, eta_f is ${etaF.toFixed(2)} and eta_r ${etaR.toFixed(2)}`;
  part.querySelector("input").setAttribute("aria-valuetext", `delta ${at}`);
  const now = {
    delta: at,
    gone: `${all.filter(Boolean).length} of ${all.length}`,
    removed: etaF.toFixed(2),
    touched: etaR.toFixed(2),
  };
  part.querySelectorAll("[data-now]").forEach((span) => (span.textContent = now[span.dataset.now]));
}

document.querySelectorAll("[data-spectrum]").forEach((part) => {
  const slider = part.querySelector("input");
  part.querySelector(".control").hidden = false;
  slider.addEventListener("input", () => show(part, spectra[part.dataset.spectrum], Number(slider.value)));
});
