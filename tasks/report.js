"use strict";
const picked = document.getElementById("picked");
for (const cell of document.querySelectorAll(".strip button")) {
  cell.addEventListener("click", () => { picked.textContent = cell.dataset.text; });
}
