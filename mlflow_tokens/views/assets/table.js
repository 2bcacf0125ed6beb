/* The table: its columns, its rows with their dividers, and what the grid calls for a cell. */
"use strict";
window.mlflowTokens = window.mlflowTokens || {};
window.dashAgGridFunctions = window.dashAgGridFunctions || {};
window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {};

(function (mt, callable, components) {
  const DIVIDER = "divider:";
  const COLUMNS = [
    { field: "rank", width: 46, text: "plain" },
    { field: "run_name", flex: 1, minWidth: 140, cellRenderer: "RunLink" },
    { field: "cost_per_million", width: 98, text: "money" },
    { field: "cost_total", width: 96, text: "money" },
    { field: "tokens", width: 72, text: "count" },
    { field: "valid_ratio", width: 68, text: "percent" },
    { field: "tokens_per_second", width: 78, text: "count" },
    { field: "tokens_per_second_per_device", width: 102, text: "count" },
    { field: "device_hours", width: 78, text: "decimal" },
    { field: "devices", width: 122 },
    { field: "price", width: 154, text: "price" },
    { field: "status", width: 74, text: "status" },
  ];

  /* A cell's text needs the language and the texts: kept here, as the grid passes neither. */
  const page = { language: "en", text: {}, runLink: "" };

  /* Columns for the grid. The language is part of every function, so that a switch redraws the cells. */
  mt.columnDefs = function (language, text, runLink) {
    Object.assign(page, { language, text, runLink });
    return COLUMNS.map(({ text: kind, ...column }) => ({
      ...column,
      headerName: text[column.field],
      headerTooltip: text[`${column.field}_hint`],
      comparator: { function: "unknownLast" },
      valueFormatter: { function: `cellText(params, '${kind || "plain"}', '${language}')` },
      tooltipValueGetter: { function: `cellHint(params, '${language}')` },
      cellClass: { function: `cellClass(params, '${kind || "plain"}')` },
      headerClass: ["plain", undefined, "price", "status"].includes(kind) ? "" : "mt-number",
    }));
  };

  /* Rows for the grid from the API's columns, each group that stands apart behind a line that says why. */
  mt.rowData = function (answer, text) {
    const names = Object.keys(answer.columns);
    const runs = Array.from({ length: answer.rows }, (_, i) => {
      const row = Object.fromEntries(names.map((name) => [name, answer.columns[name][i]]));
      row.tokens = row[`tokens_${answer.by}`];
      return row;
    });
    const groups = [...new Set(runs.map((row) => row.group))];
    if (groups.length < 2 && runs.every((row) => row.currency)) return runs;
    return groups.flatMap((group) => {
      const members = runs.filter((row) => row.group === group);
      return [{ run_id: DIVIDER + group, group, divider: reason(members[0], runs, text) }, ...members];
    });
  };

  function reason(row, runs, text) {
    if (!row.currency) return text.group_no_price;
    const differ = (field) => new Set(runs.filter((other) => other.currency).map((other) => other[field])).size > 1;
    const parts = [];
    if (differ("currency")) parts.push(mt.fill(text.group_currency, { currency: row.currency }));
    if (differ("token_definition")) {
      parts.push(
        row.token_definition
          ? mt.fill(text.group_definition, { definition: row.token_definition })
          : text.group_no_definition
      );
    }
    if (!parts.length) parts.push(mt.fill(text.group_currency, { currency: row.currency }));
    return mt.fill(text.group_apart, { reason: parts.join("; ") });
  }

  const isCost = (field) => field === "cost_per_million" || field === "cost_total";

  callable.cellText = function (params, kind, language) {
    const { value, data } = params;
    const field = params.colDef.field;
    if (data.divider) return "";
    if (!mt.known(value)) {
      if (isCost(field)) return data.currency ? page.text.unknown : page.text.no_price;
      return kind === "price" ? page.text.no_price : "–";
    }
    if (kind === "money") {
      return mt.money(value, data.currency, language) + (isCost(field) && data.corrected_by ? " *" : "");
    }
    if (kind === "status") return page.text[`status_${value}`] || value;
    if (kind === "price" || kind === "plain") return String(value);
    return mt[kind](value, language);
  };

  callable.cellHint = function (params) {
    const { value, data } = params;
    const field = params.colDef.field;
    if (data.divider || !mt.known(value) || field === "rank") return null;
    if (field === "run_name") return `${data.experiment_name} / ${value} (${data.run_id})`;
    if (typeof value !== "number") return field === "status" ? null : String(value);
    const text = isCost(field) ? mt.withCurrency(mt.exact(value), data.currency) : mt.exact(value);
    const exact = mt.fill(page.text.exact, { value: text });
    return isCost(field) && data.corrected_by ? `${exact}; ${correction(data)}` : exact;
  };

  /* Who has corrected a cost, when and why, and what was logged. */
  function correction(row) {
    const logged = mt.known(row.cost_logged)
      ? mt.withCurrency(mt.exact(row.cost_logged), row.currency)
      : page.text.unknown;
    return mt.fill(page.text.corrected, {
      by: row.corrected_by,
      at: row.corrected_at.slice(0, 10),
      note: row.correction_note || "–",
      logged,
    });
  }

  callable.cellClass = function (params, kind) {
    const number = ["money", "count", "percent", "decimal"].includes(kind) ? "mt-number" : "mt-text";
    return mt.known(params.value) ? number : `${number} mt-unknown`;
  };

  /* Ascending or descending, what is unknown stays last. */
  callable.unknownLast = function (a, b, nodeA, nodeB, descending) {
    const last = descending ? -1 : 1;
    if (!mt.known(a) || !mt.known(b)) return mt.known(a) ? -last : mt.known(b) ? last : 0;
    return typeof a === "number" ? a - b : String(a).localeCompare(String(b));
  };

  /* Whatever the sorting, groups stay apart in their order, each behind its divider. */
  callable.groupTogether = function (params) {
    const order = new Map();
    [...params.nodes]
      .sort((a, b) => a.sourceRowIndex - b.sourceRowIndex)
      .forEach((node) => order.has(node.data.group) || order.set(node.data.group, order.size));
    const place = (node) => order.get(node.data.group) * 2 + (node.data.divider ? 0 : 1);
    params.nodes.sort((a, b) => place(a) - place(b));
  };

  callable.isDivider = (params) => Boolean(params.rowNode.data.divider);
  callable.isRun = (params) => Boolean(params.data) && !params.data.divider;

  callable.gridTheme = (theme) =>
    theme.withParams({
      backgroundColor: "var(--mt-surface)",
      foregroundColor: "var(--mt-text)",
      textColor: "var(--mt-text)",
      headerBackgroundColor: "var(--mt-raised)",
      headerTextColor: "var(--mt-muted)",
      borderColor: "var(--mt-line)",
      accentColor: "var(--mt-accent)",
      rowHoverColor: "var(--mt-hover)",
      selectedRowBackgroundColor: "var(--mt-selected)",
      tooltipBackgroundColor: "var(--mt-raised)",
      tooltipTextColor: "var(--mt-text)",
      fontFamily: "inherit",
      fontSize: 13,
      headerFontSize: 12,
      headerFontWeight: 600,
      wrapperBorderRadius: 6,
      cellHorizontalPadding: 8,
      checkboxUncheckedBorderColor: "var(--mt-control)",
    });

  components.RunLink = function (props) {
    const { data, value } = props;
    if (data.divider) return null;
    if (!page.runLink) return value;
    const href = page.runLink
      .replace("{experiment_id}", encodeURIComponent(data.experiment_id))
      .replace("{run_id}", encodeURIComponent(data.run_id));
    return window.React.createElement("a", { href }, value);
  };

  components.GroupDivider = (props) =>
    window.React.createElement("div", { className: "mt-divider" }, props.data.divider);
})(window.mlflowTokens, window.dashAgGridFunctions, window.dashAgGridComponentFunctions);
