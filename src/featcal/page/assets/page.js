"use strict";
// The page around the charts: which recipe is "after", sorting, the theme, printing, the live box.
(() => {
  const { data, charts, explorer } = featcal;
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  function showAfter(place) {
    const entry = data.recipes[place];
    byId("after-name").textContent = entry.recipe === "none" ? "the same, nothing is changed" : entry.recipe;
    charts.reliability("chart-after", entry.diagram);
    const told = `ECE ${charts.percent(entry.diagram.ece)}, accuracy ${charts.percent(entry.diagram.overall_accuracy)}, mean confidence ${charts.percent(entry.diagram.overall_confidence)}`;
    byId("chart-after").setAttribute("aria-label", `Reliability diagram of ${entry.recipe}: ${told}`);
  }

  // Sorting: numbers by their value, text by itself; rows that have no number stay below.
  function compare(column, sign) {
    const key = (row) => {
      const cell = row.cells[column];
      if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
      return cell.textContent;
    };
    return (one, other) => {
      const [a, b] = [key(one), key(other)];
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
    };
  }

  function sort(table, column) {
    const heads = [...table.tHead.rows[0].cells];
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head) => head.setAttribute("aria-sort", "none"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].sort(compare(column, down ? -1 : 1));
    table.tBodies[0].append(...rows);
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => sort(table, column));
    });
  });

  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);

  function themed() {
    const button = byId("theme");
    button.setAttribute("aria-pressed", String(dark()));
    button.querySelector("span").textContent = dark() ? "Light" : "Dark";
    charts.redraw();
  }

  byId("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; themed(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);

  const copy = byId("copy");
  if (copy) copy.addEventListener("click", async () => {
    const range = document.createRange();
    range.selectNodeContents(byId("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    // Pages from a file may not use the clipboard everywhere: the old way works there.
    try { await navigator.clipboard.writeText(byId("command").textContent); } catch { document.execCommand("copy"); }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });

  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; charts.redraw(); } });

  // Paper is light, and narrower than most screens: charts are drawn anew for it.
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    root.classList.add("printing");
    charts.redraw();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    root.classList.remove("printing");
    charts.redraw();
  });

  function say(text, bad) {
    byId("recipe-message").textContent = text;
    byId("recipe-message").classList.toggle("bad", Boolean(bad));
  }

  function addRow(name, html) {
    const table = byId(`table-${name}`);
    if (!table) return;
    const holder = document.createElement("tbody");
    holder.innerHTML = html;
    table.tBodies[0].append(...holder.rows);
  }

  function receive(found) {
    const same = data.recipes.findIndex((one) => one.recipe === found.entry.recipe);
    if (same < 0) {
      data.recipes.push(found.entry);
      Object.entries(found.rows).forEach(([name, html]) => addRow(name, html));
      byId("after").add(new Option(found.entry.recipe, data.recipes.length - 1));
      if (found.sweep) explorer.add(found.sweep);
    }
    const place = same < 0 ? data.recipes.length - 1 : same;
    byId("after").value = place;
    showAfter(place);
    const metrics = found.entry.metrics;
    say([`${found.entry.recipe}: ECE ${charts.percent(metrics.ece)}, NLL ${metrics.nll.toFixed(4)}, accuracy ${charts.percent(metrics.accuracy)}. It now stands in the tables, and can be chosen as "after".`, ...(found.words || [])].join(" "));
  }

  const form = byId("recipe-form");
  if (form) form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = byId("recipe-go");
    button.disabled = true;
    say("Fitting …");
    try {
      const body = JSON.stringify({ recipe: byId("recipe").value });
      const reply = await fetch("recipe", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      const found = await reply.json();
      if (found.error) say(found.error, true); else receive(found);
    } catch {
      say("No answer: is featcal explore still running?", true);
    }
    button.disabled = false;
  });

  charts.reliability("chart-before", data.recipes[0].diagram);
  byId("chart-before").setAttribute("aria-label", `Reliability diagram of the model as it is: ECE ${charts.percent(data.recipes[0].diagram.ece)}`);
  byId("after").addEventListener("change", (event) => showAfter(Number(event.target.value)));
  showAfter(data.shown);
  explorer.show();
  if (data.units) { charts.units("chart-units", data.units); charts.allUnits("chart-all-units", data.units); }
  if (data.values) charts.values("chart-values", data.values);
  themed();
  root.dataset.ready = "yes"; // for tests, and for whoever prints without a window
})();
