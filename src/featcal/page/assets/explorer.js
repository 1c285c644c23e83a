"use strict";
// The threshold explorer: which method, which threshold, and what the numbers say there.
featcal.explorer = (() => {
  const byId = (id) => document.getElementById(id);
  const { data, charts } = featcal;
  const state = { method: 0, place: 0 };
  if (!data.sweeps.length) return { show: () => {}, add: () => {}, state };
  const sweep = () => data.sweeps[state.method];
  const fitSplit = data.about.fitted_on.split;
  const scoredSplit = data.about.scored_on.split;

  const shortly = (c) => (c === null ? "none" : Number(c.toPrecision(c < 1 ? 2 : 3)).toString());
  const threshold = (place) => sweep().thresholds[place];

  function ticks() {
    const last = sweep().thresholds.length - 1;
    const parts = last > 3 ? [0, 1, 2].map((part) => Math.round((part * (last - 1)) / 3)) : [];
    const at = parts.concat([last]);
    return { at, text: at.map((place) => (place === last ? "off" : shortly(threshold(place)))) };
  }

  function learned(values) {
    const names = { temperature: "T" };
    const told = Object.entries(values).filter(([, value]) => typeof value === "number");
    return told.slice(0, 3).map(([key, value]) => `${names[key] || key} = ${value.toPrecision(4)}`).join(", ");
  }

  function named(place) {
    const c = threshold(place);
    return c === null ? "off (nothing is clipped)" : c.toPrecision(4);
  }

  function sentence() {
    const { place } = state;
    const scores = sweep().test;
    const tail = learned(sweep().values[place]);
    const parts = [
      `${threshold(place) === null ? "Without clipping" : `At c = ${named(place)}`}${tail ? ` (${tail}, refitted)` : ""}, on ${scoredSplit}: ECE ${charts.percent(scores.ece[place])}, NLL ${scores.nll[place].toFixed(4)}, accuracy ${charts.percent(scores.accuracy[place])}, mean confidence ${charts.percent(scores.confidence[place])}.`,
    ];
    const wrong = scores.entropy.hce[place];
    const right = scores.entropy.lce[place];
    const entropies = [["wrong", wrong], ["right", right]].filter(([, value]) => value !== null);
    if (entropies.length) parts.push(`Entropy of confident ${entropies.map(([which, value]) => `${which} answers ${value.toFixed(3)}`).join(", of confident ")} nats.`);
    if (place === sweep().best) parts.push(`This is the best on ${fitSplit}.`);
    if (place === sweep().fitted) parts.push("This is what a fit chose.");
    return parts.join(" ");
  }

  // What is shown is also said, but only once it rests: not at every step of an arrow key.
  let saying;
  function sayIt() {
    clearTimeout(saying);
    saying = setTimeout(() => { byId("explorer-said").textContent = sentence(); }, 500);
  }

  function show() {
    const { place } = state;
    const found = sweep();
    const slider = byId("threshold");
    slider.max = found.thresholds.length - 1;
    slider.value = place;
    slider.setAttribute("aria-valuetext", `c ${named(place)}`);
    byId("threshold-value").textContent = named(place);
    byId("explorer-text").textContent = sentence();
    const bins = found.test.bins;
    charts.reliability("chart-sweep", charts.fromSums(bins.count[place], bins.confidence[place], bins.correct[place]));
    const both = (name, scale) => [
      { y: found.val[name].map((value) => value * scale), colour: "grey", dash: "dash" },
      { y: found.test[name].map((value) => value * scale), colour: "blue", dash: "solid", marked: true },
    ];
    const marks = ticks();
    charts.curve("curve-ece", both("ece", 100), marks, place, found.best);
    charts.curve("curve-nll", both("nll", 1), marks, place, found.best);
    charts.curve("curve-accuracy", both("accuracy", 100), marks, place, found.best);
    const entropies = [
      { y: found.test.entropy.hce, colour: "vermillion", dash: "dash", marked: true },
      { y: found.test.entropy.lce, colour: "blue", dash: "solid", marked: true },
    ];
    charts.curve("curve-entropy", entropies.filter((line) => line.y.every((value) => value !== null)), marks, place, found.best);
  }

  let waiting = false;
  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; show(); sayIt(); });
  }

  // Another method keeps the threshold where it can: the nearest on its own grid.
  function choose(method) {
    const wanted = threshold(state.place);
    state.method = method;
    const distance = (c) => (c === null || wanted === null ? (c === wanted ? 0 : Infinity) : Math.abs(Math.log(c / wanted)));
    state.place = sweep().thresholds.reduce((best, c, place, all) => (distance(c) < distance(all[best]) ? place : best), sweep().best);
    soon();
  }

  // A recipe of the live box: a method like the others, shown where its fit ended.
  function add(found) {
    let method = data.sweeps.findIndex((one) => one.recipe === found.recipe);
    if (method < 0) {
      method = data.sweeps.push(found) - 1;
      const label = document.createElement("label");
      const radio = Object.assign(document.createElement("input"), { type: "radio", name: "method", value: method });
      label.append(radio, " ", Object.assign(document.createElement("code"), { textContent: found.recipe }));
      byId("methods").append(label);
    }
    document.querySelector(`#methods input[value="${method}"]`).checked = true;
    Object.assign(state, { method, place: data.sweeps[method].fitted });
    show();
  }

  state.place = sweep().best;
  byId("threshold").addEventListener("input", (event) => { state.place = Number(event.target.value); soon(); });
  byId("methods").addEventListener("change", (event) => choose(Number(event.target.value)));
  document.querySelectorAll("[data-jump]").forEach((button) => button.addEventListener("click", () => {
    const found = sweep();
    state.place = { best: found.best, fitted: found.fitted, last: found.thresholds.length - 1 }[button.dataset.jump];
    soon();
  }));
  return { show, add, state };
})();
