"use strict";
const strip = document.querySelector(".strip");
if (strip) {
  const picked = document.getElementById("picked");
  const rows = Array.from(strip.querySelectorAll("tr:not(.axis)"), (row) =>
    Array.from(row.querySelectorAll("button")));
  const line = (tag, text) => {
    const element = document.createElement(tag);
    element.textContent = text;
    return element;
  };
  const choose = (cell, focus) => {
    for (const other of strip.querySelectorAll(".chosen")) {
      other.classList.remove("chosen");
      other.tabIndex = -1;
    }
    cell.classList.add("chosen");
    cell.tabIndex = 0;
    if (focus) cell.focus();
    const { where, a, b } = cell.dataset;
    const state = cell.classList.contains("equal") ? "equal"
      : cell.classList.contains("absent") ? "not in both legs" : "differs";
    picked.replaceChildren(
      line("b", where), ` ${state}`,
      line("code", `${strip.dataset.a}  ${a || "none"}`),
      line("code", `${strip.dataset.b}  ${b || "none"}`));
  };
  strip.addEventListener("click", (event) => {
    if (event.target.matches("button")) choose(event.target, true);
  });
  strip.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    const y = rows.findIndex((row) => row.includes(event.target));
    const next = (rows[y + move[0]] || [])[rows[y]?.indexOf(event.target) + move[1]];
    if (next) {
      event.preventDefault();
      choose(next, true);
    }
  });
  const first = strip.querySelector(".differs");
  if (first) choose(first, false);
  else if (rows.length && rows[0].length) rows[0][0].tabIndex = 0;
}
