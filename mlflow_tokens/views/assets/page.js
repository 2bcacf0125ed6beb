/* The page's callbacks. Numbers come from the JSON API and from nowhere else. */
"use strict";
window.mlflowTokens = window.mlflowTokens || {};
window.dash_clientside = window.dash_clientside || {};

(function (mt) {
  const DRAWN_UNASKED = 10;
  const MOST_ROWS_HIGH = 18;
  const DENOMINATORS = ["effective", "valid", "trained", "computed"];
  const DROPDOWN_LABELS = [
    "select_all", "deselect_all", "selected_count", "search", "clear_search", "clear_selection", "no_options_found",
  ];

  const nothingNew = (outputs) => Array(outputs).fill(window.dash_clientside.no_update);
  const element = (type, props) => ({ namespace: "dash_html_components", type, props });
  const languageOf = (stored) => stored || (navigator.language.startsWith("zh") ? "zh" : "en");

  /* The API's answer, or {error} with what the server says; never an exception. */
  async function ask(setup, question, parameters) {
    let response;
    try {
      response = await fetch(`${setup.api}${question}?${parameters}`);
    } catch (failure) {
      return { error: null };
    }
    try {
      return await response.json();
    } catch (failure) {
      return { error: `HTTP ${response.status}` };
    }
  }

  /* Only the last of several running questions of one kind may answer. */
  const turns = {};
  const takeTurn = (kind) => {
    const turn = (turns[kind] = (turns[kind] || 0) + 1);
    return () => turns[kind] === turn;
  };

  function chooseLanguage() {
    return window.dash_clientside.callback_context.triggered_id === "language-zh" ? "zh" : "en";
  }

  function speak(stored, ids, setup) {
    const language = languageOf(stored);
    const text = setup.text[language];
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    document.title = text.title;
    return [
      ids.map((id) => text[id.text]),
      DENOMINATORS.map((by) => ({ value: by, label: text[`by_${by}`], title: text[`by_${by}_hint`] })),
      text.all_experiments,
      Object.fromEntries(DROPDOWN_LABELS.map((label) => [label, text[label]])),
      String(language === "en"),
      String(language === "zh"),
    ];
  }

  async function fetchExperiments(clicks, setup) {
    const answer = await ask(setup, "experiments", "");
    /* An error shows where the runs should be: they are asked of the same server. */
    return (answer.experiments || []).map(({ name }) => ({ label: name, value: name }));
  }

  async function fetchRuns(by, experiments, clicks, setup) {
    const mine = takeTurn("runs");
    const parameters = new URLSearchParams({ by });
    (experiments || []).forEach((name) => parameters.append("experiment", name));
    const answer = await ask(setup, "runs", parameters);
    return mine() ? answer : window.dash_clientside.no_update;
  }

  function showRuns(answer, stored, experiments, setup) {
    const language = languageOf(stored);
    const text = setup.text[language];
    const without = (message) => [message, true, "", [], [], { height: "0px" }];
    if (!answer) return without(element("P", { className: "mt-loading", children: text.loading }));
    if ("error" in answer) {
      return without(
        notice("mt-error", text.error_title, answer.error || `${text.error_network}. ${text.error_network_advice}`)
      );
    }
    if (!answer.rows) {
      const kind = experiments && experiments.length ? "empty_filter" : "empty";
      return without(notice("mt-empty", text[`${kind}_title`], text[`${kind}_body`], setup.autolog));
    }
    const rows = mt.rowData(answer, text);
    const ranked = answer.columns.rank.filter(mt.known).length;
    return [
      null,
      false,
      mt.fill(text.summary, { runs: answer.rows, ranked }),
      mt.columnDefs(language, text, setup.run_link),
      rows,
      { height: `${34 + 30 * Math.min(rows.length, MOST_ROWS_HIGH) + 4}px`, width: "100%" },
    ];
  }

  function notice(className, title, body, code) {
    const children = [element("H2", { children: title }), element("P", { children: body })];
    if (code) children.push(element("Pre", { children: element("Code", { children: code }) }));
    return element("Div", { className: `mt-notice ${className}`, children });
  }

  async function showCurves(answer, selected, stored, dark, setup) {
    const mine = takeTurn("curves");
    const hidden = [true, null, ""];
    if (!answer || !answer.rows) return hidden;
    const language = languageOf(stored);
    const text = setup.text[language];
    const columns = answer.columns;
    const says = (note) => [false, null, note];

    const wanted = new Set((selected || []).map((row) => row.run_id));
    let drawn = [...columns.run_id.keys()].filter((i) => wanted.has(columns.run_id[i]));
    let note = "";
    if (drawn.length) {
      const currencies = [...new Set(drawn.map((i) => columns.currency[i]).filter(mt.known))];
      if (currencies.length > 1) return says(mt.fill(text.plot_mixed, { currencies: currencies.join(", ") }));
      if (drawn.length > setup.max_curves) {
        note = mt.fill(text.plot_capped, { shown: setup.max_curves, selected: drawn.length });
        drawn = drawn.slice(0, setup.max_curves);
      }
    } else {
      const comparable = (i) => mt.known(columns.rank[i]) && columns.group[i] === columns.group[0];
      drawn = [...columns.run_id.keys()].filter(comparable).slice(0, DRAWN_UNASKED);
    }
    if (!drawn.length) return says(text.plot_none);

    const parameters = new URLSearchParams({ by: answer.by });
    drawn.forEach((i) => parameters.append("run_id", columns.run_id[i]));
    const found = await ask(setup, "curves", parameters);
    if (!mine()) return nothingNew(3);
    if ("error" in found) return says(found.error || text.error_network);
    const curves = found.curves.filter((curve) => curve.x.length);
    if (!curves.length) return says(text.plot_none);
    const names = Object.fromEntries(drawn.map((i) => [columns.run_id[i], columns.run_name[i]]));
    const currency = columns.currency[drawn.find((i) => mt.known(columns.currency[i]))];
    const figure = mt.figure(curves, names, currency, text[`by_${answer.by}`], text, language);
    const graph = {
      namespace: "dash_core_components",
      type: "Graph",
      props: { id: "curves", figure, config: { displayModeBar: false, responsive: true }, style: { height: "360px" } },
    };
    return [false, graph, note];
  }

  window
    .matchMedia("(prefers-color-scheme: dark)")
    .addEventListener("change", (event) => window.dash_clientside.set_props("dark", { data: event.matches }));

  window.dash_clientside.mlflowTokens = {
    chooseLanguage, speak, fetchExperiments, fetchRuns, showRuns, showCurves,
  };
})(window.mlflowTokens);
