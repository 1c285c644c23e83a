"use strict";
// How numbers become pictures. Every chart is a function of numbers and of the colours of the page,
// so that a change of theme, a print, or another threshold is the same call again.
const featcal = { data: JSON.parse(document.getElementById("featcal-data").textContent) };

featcal.charts = (() => {
  const FEW = 100; // rows of a bin below which its bar is drawn faintly
  const BANDED = 10; // rows below which a band is as good as everything
  const drawn = new Map(); // element id -> function that draws it again

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["ground", "ink", "soft", "line", "blue", "vermillion", "purple", "grey"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  function draw(id, make) {
    const element = document.getElementById(id);
    if (!element) return;
    const again = () => {
      const hue = colours();
      const { traces, layout } = make(hue, element.clientWidth);
      const config = { displayModeBar: false, responsive: false, doubleClick: false };
      Plotly.react(element, traces, framed(layout, hue, element), config);
    };
    drawn.set(id, again);
    again();
  }

  function redraw() { drawn.forEach((again) => again()); }

  function axis(hue, more) {
    return { color: hue.soft, gridcolor: hue.line, zerolinecolor: hue.line, linecolor: hue.grey,
      showline: true, ticks: "outside", tickcolor: hue.grey, fixedrange: true, automargin: true, ...more };
  }

  function framed(layout, hue, element) {
    return { font: { family: "system-ui, sans-serif", size: 12, color: hue.ink },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false,
      margin: { l: 48, r: 10, t: 8, b: 40 }, hoverlabel: { font: { size: 12 } },
      width: element.clientWidth, height: element.clientHeight, ...layout };
  }

  const strength = (count) => Math.min(1, Math.max(0.25, Math.sqrt(count / FEW)));

  // The columns a diagram is drawn from, out of sums: rows, summed confidence, right rows.
  function fromSums(count, confidence, correct) {
    const share = (sum, place) => (count[place] ? sum[place] / count[place] : null);
    const accuracy = count.map((_, place) => share(correct, place));
    const mean = count.map((_, place) => share(confidence, place));
    const edges = count.map((_, place) => place / count.length).concat([1]);
    return { edges, count, accuracy, mean_confidence: mean, low: null, high: null };
  }

  function reliability(id, numbers) {
    draw(id, (hue) => {
      const bins = numbers.count.length;
      const middle = numbers.edges.slice(0, bins).map((edge) => edge + 0.5 / bins);
      const width = 1 / bins;
      const faint = numbers.count.map(strength);
      const gap = numbers.count.map((count, k) => (count ? numbers.mean_confidence[k] - numbers.accuracy[k] : 0));
      const total = numbers.count.reduce((sum, count) => sum + count, 0) || 1;
      const told = numbers.count.map((count, k) => count
        ? `says ${percent(numbers.mean_confidence[k])}, is right ${percent(numbers.accuracy[k])}<br>${count.toLocaleString("en")} rows` : "");
      const bar = { type: "bar", x: middle, width, hoverinfo: "text", hovertext: told };
      const edge = (colour) => ({ color: colour, width: 0.8 });
      const gaps = (name, colour, shape, sign) => ({ ...bar, name,
        base: numbers.accuracy.map((value, k) => (sign * gap[k] > 0 ? value : null)),
        y: gap.map((value) => (sign * value > 0 ? value : null)),
        marker: { color: fade(colour, 0.16), opacity: faint, line: edge(colour),
          pattern: { shape, fgcolor: colour, bgcolor: fade(colour, 0.16), size: 6, solidity: 0.35 } } });
      const bands = numbers.low ? { error_y: { type: "data", symmetric: false, thickness: 1.3, width: 3, color: hue.ink,
        array: numbers.high.map((high, k) => high - numbers.accuracy[k]),
        arrayminus: numbers.low.map((low, k) => numbers.accuracy[k] - low) } } : {};
      const traces = [
        { ...bar, name: "is right", y: numbers.accuracy, marker: { color: hue.blue, opacity: faint, line: edge(hue.ground) } },
        gaps("too sure", hue.vermillion, "/", 1),
        gaps("too modest", hue.purple, ".", -1),
        { type: "scatter", mode: "lines", name: "honest", x: [0, 1], y: [0, 1], hoverinfo: "skip", line: { color: hue.ink, width: 1.4, dash: "dash" } },
        { type: "scatter", mode: "markers", x: middle, y: numbers.accuracy.map((value, k) => (numbers.count[k] >= BANDED ? value : null)), showlegend: false, hoverinfo: "skip", marker: { size: 1, color: hue.ink }, ...bands },
        { ...bar, name: "rows", y: numbers.count.map((count) => count / total), yaxis: "y2", showlegend: false, marker: { color: hue.grey } },
      ];
      const tenths = { tickformat: ".0%", range: [0, 1], tickvals: [0, 0.2, 0.4, 0.6, 0.8, 1] };
      const layout = { barmode: "overlay", bargap: 0, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
        margin: { l: 52, r: 20, t: 34, b: 40 },
        xaxis: axis(hue, { ...tenths, title: { text: "how sure it is", standoff: 6 }, anchor: "y2" }),
        yaxis: axis(hue, { ...tenths, title: { text: "how often it is right", standoff: 6 }, domain: [0.27, 1] }),
        yaxis2: axis(hue, { title: { text: "rows", standoff: 6 }, tickformat: ".0%", nticks: 3, domain: [0, 0.2], rangemode: "tozero" }) };
      return { traces, layout };
    });
  }

  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  function fade(colour, alpha) {
    const part = (from) => parseInt(colour.slice(from, from + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
  }

  function units(id, found) {
    draw(id, (hue) => {
      const places = found.chosen.unit.map((_, place) => place);
      const told = (name) => found.chosen.unit.map((unit, k) => `unit ${unit}: ${found.chosen[name][k]?.toPrecision(3)}`); // a group may have no rows
      const traces = known(found, [
        ["hce", { type: "bar", name: "confident and wrong", x: places, y: found.chosen.hce, width: 0.95, hovertext: told("hce"), hoverinfo: "text+name",
          marker: { color: "rgba(0,0,0,0)", line: { color: hue.vermillion, width: 0.8 }, pattern: { shape: "/", fgcolor: hue.vermillion, bgcolor: "rgba(0,0,0,0)", size: 5, solidity: 0.3 } } }],
        ["lce", { type: "bar", name: "confident and right", x: places, y: found.chosen.lce, width: 0.5, hovertext: told("lce"), hoverinfo: "text+name", marker: { color: hue.blue } }],
      ]);
      return { traces, layout: { barmode: "overlay", ...above(), xaxis: axis(hue, { showticklabels: false, ticks: "" }),
        yaxis: axis(hue, { title: { text: found.absolute ? "mean |feature|" : "mean feature" } }) } };
    });
  }

  function allUnits(id, found) {
    draw(id, (hue) => {
      const places = found.all.unit.map((_, place) => place);
      const traces = known(found, [
        ["lce", { type: "scatter", mode: "lines", name: "right", x: places, y: found.all.lce, fill: "tozeroy", fillcolor: fade(hue.blue, 0.35), line: { color: hue.blue, width: 1.5 }, hoverinfo: "skip" }],
        ["hce", { type: "scatter", mode: "markers", name: "wrong", x: places, y: found.all.hce, marker: { color: hue.vermillion, size: 2.6 }, hoverinfo: "skip" }],
      ]);
      return { traces, layout: { ...above(), xaxis: axis(hue, { title: { text: "units" } }),
        yaxis: axis(hue, { title: { text: found.absolute ? "mean |feature|" : "mean feature" } }) } };
    });
  }

  function values(id, found) {
    draw(id, (hue) => {
      const widths = found.edges.slice(1).map((edge, k) => edge - found.edges[k]);
      const middles = widths.map((width, k) => found.edges[k] + width / 2);
      const density = (name) => found.counts[name].map((count, k) => (count ? count / found.values[name] / widths[k] : null));
      const line = (name, words, colour, dash) => ({ type: "scatter", mode: "lines", name: words, x: middles, y: density(name),
        line: { shape: "hvh", color: colour, width: 1.6, dash }, hoverinfo: "skip" });
      const traces = known(found, [["lce", line("lce", "right", hue.blue, "solid")], ["hce", line("hce", "wrong", hue.vermillion, "dash")]]);
      return { traces, layout: { ...above(), xaxis: axis(hue, { title: { text: "feature value" } }),
        yaxis: axis(hue, { type: "log", title: { text: "density", standoff: 10 }, exponentformat: "power", dtick: 1 }) } };
    });
  }

  // A group without rows has no line, and no name in the legend.
  const known = (found, pairs) => pairs.filter(([name]) => found.groups[name] > 0).map(([, trace]) => trace);

  const above = () => ({ showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } }, margin: { l: 58, r: 10, t: 30, b: 40 } });

  // One curve against the place of the threshold, with the chosen and the best place marked.
  function curve(id, lines, ticks, chosen, best) {
    draw(id, (hue) => {
      const traces = lines.map((line) => ({ type: "scatter", mode: "lines", x: line.y.map((_, place) => place), y: line.y,
        line: { color: hue[line.colour], width: line.dash === "dash" ? 1.5 : 2, dash: line.dash }, hoverinfo: "skip" }));
      lines.filter((line) => line.marked).forEach((line) => {
        const dot = (place, symbol, size) => ({ type: "scatter", mode: "markers", x: [place], y: [line.y[place]], hoverinfo: "skip",
          marker: { symbol, size, color: symbol === "star" ? hue.ground : hue.ink, line: { color: hue.ink, width: 1.3 } } });
        traces.push(dot(best, "star", 13), dot(chosen, "diamond", 8));
      });
      const rule = { type: "line", x0: chosen, x1: chosen, yref: "paper", y0: 0, y1: 1, line: { color: hue.soft, width: 1, dash: "dot" } };
      return { traces, layout: { showlegend: false, margin: { l: 46, r: 12, t: 6, b: 34 }, shapes: [rule],
        xaxis: axis(hue, { tickvals: ticks.at, ticktext: ticks.text, tickangle: 0, showgrid: false }), yaxis: axis(hue, { nticks: 4 }) } };
    });
  }

  return { reliability, fromSums, units, allUnits, values, curve, redraw, percent };
})();
