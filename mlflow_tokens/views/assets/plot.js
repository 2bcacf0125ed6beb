/* The plot: cost per million tokens over tokens, one line a run. */
"use strict";
window.mlflowTokens = window.mlflowTokens || {};

(function (mt) {
  /* Told apart with every common colour blindness, and 3:1 against either background. */
  const LIGHT = ["#0b6bcb", "#c4490a", "#10794f", "#a3368f", "#8a6100", "#5b4bc4", "#0a7a8c", "#b3261e", "#4d5b6b", "#6b7a00"];
  const DARK = ["#6fb6ff", "#ff9a5c", "#58cf9b", "#ee8fdc", "#e6c04d", "#aa9dff", "#5cd0e0", "#ff8a80", "#aab7c4", "#c3d24a"];
  const LONGEST_NAME = 34;
  /* The first snapshots carry the whole start-up and would flatten the rest: the axis ends above what
     the curves show after this share of their tokens. A double click shows everything. */
  const SETTLED_FROM = 0.1;

  /* Plotly reads a little HTML in its texts: names are text and nothing else. */
  const plain = (name) =>
    (name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME - 1)}…` : name)
      .replaceAll("&", "&amp;")
      .replaceAll("<", "&lt;")
      .replaceAll(">", "&gt;");

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  mt.isDark = () => window.matchMedia("(prefers-color-scheme: dark)").matches;

  /* A figure of `curves` ({run_id, x, y}); names by run id, by the text of the denominator. */
  mt.figure = function (curves, names, currency, by, text, language) {
    const [size, unit] = mt.axisUnit(Math.max(...curves.map((curve) => curve.x.at(-1))), language);
    const colors = mt.isDark() ? DARK : LIGHT;
    const axis = {
      gridcolor: color("--mt-line"), zerolinecolor: color("--mt-line"), linecolor: color("--mt-line"),
      tickfont: { size: 12 }, automargin: true,
    };
    return {
      data: curves.map((curve, place) => ({
        type: "scatter",
        mode: curve.x.length > 2 ? "lines" : "lines+markers",
        name: plain(names[curve.run_id]),
        x: curve.x.map((tokens) => tokens / size),
        y: curve.y,
        text: curve.x.map((tokens, i) =>
          mt.known(curve.y[i]) ? `${mt.count(tokens, language)}: ${mt.money(curve.y[i], currency, language)}` : ""),
        hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
        line: { width: 2, color: colors[place % colors.length], dash: place < colors.length ? "solid" : "dot" },
      })),
      layout: {
        margin: { l: 64, r: 16, t: 12, b: 48 },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: color("--mt-font"), color: color("--mt-text"), size: 12 },
        hoverlabel: { bgcolor: color("--mt-raised"), font: { color: color("--mt-text") }, namelength: -1 },
        showlegend: true,
        legend: { orientation: "v", x: 1.01, y: 1, xanchor: "left", font: { size: 12 } },
        xaxis: { ...axis, rangemode: "tozero", title: { text: unit ? `${mt.fill(text.plot_x, { by })} (${unit})` : by } },
        yaxis: { ...axis, ...costRange(curves), title: { text: mt.fill(text.plot_y, { currency, by }), standoff: 14 } },
      },
    };
  };

  function costRange(curves) {
    const settled = curves.flatMap((curve) =>
      curve.y.filter((cost, i) => mt.known(cost) && curve.x[i] >= SETTLED_FROM * curve.x.at(-1)));
    return settled.length ? { range: [0, 1.1 * Math.max(...settled)] } : { rangemode: "tozero" };
  }
})(window.mlflowTokens);
