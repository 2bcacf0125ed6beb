/* Numbers as people read them, in both languages. Every function returns plain text. */
"use strict";
window.mlflowTokens = window.mlflowTokens || {};

(function (mt) {
  const UNITS = {
    en: [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]],
    zh: [[1e12, "万亿"], [1e8, "亿"], [1e4, "万"]],
  };

  const known = (value) => value !== null && value !== undefined;
  const grouped = (value, digits) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  /* 7200000000 is 7.2B or 72亿: three digits, the unit chosen after rounding. */
  mt.count = function (value, language) {
    const rounded = Number(value.toPrecision(3));
    for (const [size, unit] of UNITS[language]) {
      if (Math.abs(rounded) >= size) return `${grouped(rounded / size, undefined)}${unit}`;
    }
    return Math.abs(value) >= 100 ? grouped(value, 0) : String(rounded);
  };

  /* ¥8.90 and 1.23 USD; three digits below 1, so that small costs stay apart. */
  mt.money = function (value, currency, language) {
    let text = Math.abs(value) < 1 ? value.toPrecision(3) : grouped(value, 2);
    if (Math.abs(value) >= 1e6) text = mt.count(value, language);
    return mt.withCurrency(text, currency);
  };

  mt.withCurrency = (text, currency) => (currency === "CNY" ? `¥${text}` : `${text} ${currency}`);

  mt.percent = (value) => `${(100 * value).toFixed(1)}%`;

  mt.decimal = (value) => (Math.abs(value) >= 100 ? grouped(value, 0) : String(Number(value.toPrecision(3))));

  /* The value as the server sent it, with its digits grouped. */
  mt.exact = (value) => value.toLocaleString("en", { maximumSignificantDigits: 17 });

  /* The unit of an axis that ends at `largest`: [size, name]. */
  mt.axisUnit = (largest, language) => UNITS[language].find(([size]) => largest >= size) || [1, ""];

  mt.known = known;

  /* Fills {name} in a text of the page. */
  mt.fill = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
})(window.mlflowTokens);
