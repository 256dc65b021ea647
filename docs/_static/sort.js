// Tables of numbers are sorted by a click on, or Enter in, the head of a column; again, the other way round.

// The first number of a cell, 1,234.5 or 2.0e-07; null where it has none, as a dash.
function numberOf(text) {
  const found = text.replace(/,(?=\d{3})/g, "").match(/[-−]?\d+(\.\d+)?(e[-+]?\d+)?/i);
  return found ? Number(found[0].replace("−", "-")) : null;
}

// Cells without a number come last either way.
function compare(a, b, numeric, sign) {
  if (!numeric) return sign * a.localeCompare(b);
  const [x, y] = [numberOf(a), numberOf(b)];
  if (x === null || y === null) return (x === null) - (y === null);
  return sign * (x - y);
}

function sortBy(table, column, head) {
  const rows = [...table.tBodies[0].rows];
  const texts = new Map(rows.map((row) => [row, row.cells[column] ? row.cells[column].textContent.trim() : ""]));
  const numeric = rows.filter((row) => /^[-−±]?\d/.test(texts.get(row))).length * 2 > rows.length;
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  rows.sort((a, b) => compare(texts.get(a), texts.get(b), numeric, sign));
  table.tBodies[0].append(...rows);
}

if (typeof document !== "undefined") {
  document.addEventListener("DOMContentLoaded", () => {
    for (const table of document.querySelectorAll("article table:not(.autosummary)")) {
      if (!table.tHead || table.tBodies.length !== 1 || table.tBodies[0].rows.length < 4) continue;
      [...table.tHead.rows[0].cells].forEach((head, column) => {
        head.tabIndex = 0;
        head.style.cursor = "pointer";
        head.title = "sort by this column";
        head.addEventListener("click", () => sortBy(table, column, head));
        head.addEventListener("keydown", (event) => event.key === "Enter" && sortBy(table, column, head));
      });
    }
  });
}
