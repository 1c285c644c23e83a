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

  // One class, or one label: every one can be chosen, the worst first and those without rows last.
  const sides = [["before", "as it is"], ["after", `after ${data.recipes[data.shown].recipe}`]]
    .filter(([side]) => byId(`chart-class-${side}`));
  const signed = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)}`;

  function showClass(place) {
    const told = sides.map(([side, words]) => {
      const found = data.classes[side];
      const sums = [1, 2, 3].map(() => data.recipes[0].diagram.count.map(() => 0));
      found.bins[place].forEach(([bin, ...values]) => values.forEach((value, k) => { sums[k][bin] = value; }));
      charts.reliability(`chart-class-${side}`, charts.fromSums(...sums));
      const { count, confidence, accuracy, overconfidence, interval } = found.groups[place];
      return count === 0 ? `${words}: no rows` : `${words}: ${count.toLocaleString("en")} rows, ${charts.percent(confidence)} sure on average and right in ${charts.percent(accuracy)}, a gap of ${signed(overconfidence)} points (95 % interval ${interval.map(signed).join(" to ")})`;
    });
    byId("class-text").textContent = `${data.classes.before.groups[place].name}, ${told.join("; ")}.`;
  }

  function listClasses() {
    const { groups, worst } = data.classes.before;
    const rest = groups.map((_, place) => place).filter((place) => groups[place].count === 0);
    byId("class").append(...[...worst, ...rest].map((place) => new Option(groups[place].name, place)));
    byId("class").addEventListener("change", (event) => showClass(Number(event.target.value)));
    showClass(Number(byId("class").value));
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
    byId("copied").textContent = "Copied";
    setTimeout(() => { byId("copied").textContent = ""; }, 2500);
  });

  // A table that is wider than the screen says so: nothing else shows that there are more columns.
  const hinted = new ResizeObserver((seen) => seen.forEach(({ target }) => {
    const box = target.closest(".scroll");
    box.classList.toggle("more", box.scrollWidth > box.clientWidth + 1);
  }));
  document.querySelectorAll(".scroll").forEach((box) => { hinted.observe(box); hinted.observe(box.querySelector("table")); });

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

  function say(sentences, bad) {
    const made = sentences.map((text) => Object.assign(document.createElement("p"), { textContent: text }));
    byId("recipe-message").replaceChildren(...made);
    byId("recipe-message").classList.toggle("bad", Boolean(bad));
    // A refusal belongs to what was typed; what was found is long, and is not read at every focus.
    const box = byId("recipe");
    box.setAttribute("aria-invalid", String(Boolean(bad)));
    if (bad) box.setAttribute("aria-describedby", "recipe-message"); else box.removeAttribute("aria-describedby");
  }

  function rowOf(html) {
    const holder = document.createElement("tbody");
    holder.innerHTML = html;
    return holder.rows[0];
  }

  const recipeOf = (row) => row.cells[0].querySelector("code").textContent;

  // Beside another recipe the best of a column may be another one.
  function judge(rows) {
    [...byId("table-comparison").tBodies[0].rows].forEach((row) => {
      const html = rows[recipeOf(row)];
      if (html) row.replaceWith(rowOf(html));
    });
  }

  function learned(entry) {
    if (!entry.fitted) return;
    const item = document.createElement("li");
    item.append(Object.assign(document.createElement("code"), { textContent: entry.recipe }), `: ${entry.fitted}`);
    byId("fits").querySelector("ul").append(item);
    byId("fits").hidden = false;
  }

  function add(found) {
    data.recipes.push(found.entry);
    Object.entries(found.rows).forEach(([name, html]) => byId(`table-${name}`)?.tBodies[0].append(rowOf(html)));
    byId("after").add(new Option(found.entry.recipe, data.recipes.length - 1));
    learned(found.entry);
  }

  function receive(found) {
    const same = data.recipes.findIndex((one) => one.recipe === found.entry.recipe);
    if (same < 0) add(found);
    judge(found.judged);
    if (found.sweep) explorer.add(found.sweep);
    const place = same < 0 ? data.recipes.length - 1 : same;
    byId("after").value = place;
    showAfter(place);
    const { recipe, fitted, metrics, differences } = found.entry;
    const judged = (name) => (["better", "worse"].includes(differences[name].verdict) ? ` (${differences[name].verdict})` : "");
    const told = [`ECE ${charts.percent(metrics.ece)}${judged("ece")}`, `NLL ${metrics.nll.toFixed(4)}${judged("nll")}`, `accuracy ${charts.percent(metrics.accuracy)}${judged("accuracy")}`];
    say([`${recipe}${fitted ? `, ${fitted}` : ""}: ${told.join(", ")}.`,
      `It is ${same < 0 ? "now" : "already"} in the tables of all recipes below, and stands as “after”${found.sweep ? " and in the threshold explorer" : ""}. The summary above and the tables of single answers and classes stay as they were.`,
      ...found.words]);
  }

  const form = byId("recipe-form");
  if (form) form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = byId("recipe-go");
    button.disabled = true;
    say(["Fitting …"]);
    try {
      const beside = data.recipes.map((one) => one.recipe);
      const body = JSON.stringify({ recipe: byId("recipe").value, beside });
      const reply = await fetch("recipe", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      const found = await reply.json();
      if (found.error) say([found.error], true); else receive(found);
    } catch {
      say(["No answer: is featcal explore still running?"], true);
    }
    button.disabled = false;
  });

  // Plotly lies in the page packed; what runs it is this page's own script, so the policy allows it.
  async function unpack() {
    const packed = Uint8Array.from(atob(byId("plotly").textContent), (letter) => letter.charCodeAt(0));
    const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(plain).text();
    byId("plotly").replaceWith(script);
  }

  function begin() {
    charts.reliability("chart-before", data.recipes[0].diagram);
    byId("chart-before").setAttribute("aria-label", `Reliability diagram of the model as it is: ECE ${charts.percent(data.recipes[0].diagram.ece)}`);
    byId("after").addEventListener("change", (event) => showAfter(Number(event.target.value)));
    showAfter(data.shown);
    listClasses();
    explorer.show();
    if (data.units) { charts.units("chart-units", data.units); charts.allUnits("chart-all-units", data.units); }
    if (data.values) charts.values("chart-values", data.values);
    themed();
    root.dataset.ready = "yes"; // for tests, and for whoever prints without a window
  }

  unpack().then(begin);
})();
