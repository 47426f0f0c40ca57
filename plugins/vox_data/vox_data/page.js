"use strict";
// Rows become elements when they come into sight: a thousand of them may have millions of tokens.
// Whatever comes from the data is put in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main"), says = document.getElementById("says");
  const [search, file, finding] = ["search", "file", "finding"].map(i => document.getElementById(i));
  const [trainedOnly, found, truncated] =
    ["trained-only", "with-findings", "truncated"].map(i => document.getElementById(i));
  // What could steer the reading: control characters, direction marks, halves of surrogates.
  const STEERING = new RegExp("[\\u0000-\\u0009\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2066-\\u2069]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|" +
    "(?<![\\ud800-\\udbff])[\\udc00-\\udfff]|\\n", "g");

  const make = (kind, name, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const put = (parent, text) => {
    let at = 0;
    for (const match of text.matchAll(STEERING)) {
      parent.append(text.slice(at, match.index));
      if (match[0] === "\n") {
        const end = make("span", "end", "↵");
        end.setAttribute("aria-hidden", "true");
        parent.append(end, "\n");
      } else if (match[0] === "\t") {
        parent.append("\t");
      } else {
        const code = match[0].charCodeAt(0).toString(16).padStart(4, "0");
        parent.append(make("span", "control", "\\u" + code));
      }
      at = match.index + match[0].length;
    }
    parent.append(text.slice(at));
  };

  const rows = data.rows.map((row, number) => {
    const special = new Set(row.special), starts = new Set(row.starts);
    const text = row.fault === null ? row.tokens.join("") : row.fault;
    const article = make("article");
    article.tabIndex = 0;
    const head = make("header");
    head.append(make("b", "", `${data.files[row.file]}:${row.line}`), ` ${row.form}, ` +
      `${row.tokens.length} tokens, ${row.weights.filter(w => w !== 0).length} trained`);
    if (row.cut !== "none") head.append(`, cut: ${row.cut}`);
    if (row.dropped) head.append(make("span", "finding", `, dropped: ${row.dropped}`));
    for (const id of row.findings) head.append(" ", make("span", "finding", id));
    article.setAttribute("aria-label", head.textContent);
    const body = make("pre");
    article.append(head, body);
    article.dataset.row = number;
    return { ...row, number, special, starts, text, low: text.toLowerCase(), article, body,
      spans: null };
  });

  const fill = row => {
    if (row.spans) return;
    row.spans = row.tokens.map((text, at) => {
      const weight = row.weights[at];
      const span = make("span", "t");
      if (weight !== 0) span.classList.add("on");
      if (weight !== 0 && weight !== 1) span.classList.add("part");
      if (row.special.has(at)) span.classList.add("special");
      if (at >= row.kept) span.classList.add("cut");
      if (row.starts.has(at)) span.classList.add("start");
      span.dataset.at = at;
      put(span, text);
      return span;
    });
    if (row.fault === null) row.body.append(...row.spans);
    else row.body.append(make("span", "finding", "cannot be rendered: " + row.fault));
    mark(row);
  };

  const mark = row => {  // the tokens in which the words that are looked for stand
    if (!row.spans) return;
    for (const span of row.body.querySelectorAll(".hit")) span.classList.remove("hit");
    const words = search.value.toLowerCase();
    if (!words || row.low.length !== row.text.length) return;
    const ranges = [];
    for (let at = row.low.indexOf(words); at >= 0; at = row.low.indexOf(words, at + 1))
      ranges.push([at, at + words.length]);
    let start = 0, next = 0;
    row.tokens.forEach((text, at) => {
      const stop = start + text.length;
      while (next < ranges.length && ranges[next][1] <= start) next += 1;
      if (next < ranges.length && ranges[next][0] < stop && text)
        row.spans[at].classList.add("hit");
      start = stop;
    });
  };

  const wanted = row =>
    (!search.value || row.low.includes(search.value.toLowerCase())) &&
    (!file.value || String(row.file) === file.value) &&
    (!finding.value || row.findings.includes(finding.value)) &&
    (!found.checked || row.findings.length > 0 || row.fault !== null) &&
    (!truncated.checked || row.cut !== "none");

  const show = () => {
    let shown = 0;
    for (const row of rows) {
      row.article.hidden = !wanted(row);
      shown += !row.article.hidden;
      if (!row.article.hidden) mark(row);
    }
    main.classList.toggle("trained-only", trainedOnly.checked);
    document.getElementById("count").textContent =
      `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows`;
  };

  const tell = (row, at) => {
    const kind = row.special.has(at) ? ", special" : "";
    return `token ${at}${kind}: id ${row.ids[at]}, weight ${row.weights[at]}` +
      (at >= row.kept ? ", cut away" : "");
  };
  const rowOf = node => rows[Number(node.closest("article").dataset.row)];
  main.addEventListener("mouseover", event => {
    const span = event.target.closest("span.t");
    if (!span) return;
    says.textContent = span.title = tell(rowOf(span), Number(span.dataset.at));
  });

  let current = null;  // the token that the arrow keys are at
  const go = (row, step) => {
    fill(row);
    const at = current && current.row === row ? current.at + step : step > 0 ? 0 : row.spans.length - 1;
    const next = row.spans[Math.max(0, Math.min(row.spans.length - 1, at))];
    if (!next) return;
    if (current) current.row.spans[current.at].classList.remove("at");
    current = { row, at: Number(next.dataset.at) };
    next.classList.add("at");
    next.scrollIntoView({ block: "nearest" });
    says.textContent = `${row.tokens[current.at].trim()} ${tell(row, current.at)}`.trim();
  };
  const step = (row, by) => {
    for (let at = row.number + by; rows[at]; at += by)
      if (!rows[at].article.hidden) return rows[at].article.focus();
  };
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const article = event.target.closest("article");
    const keys = {
      "/": () => search.focus(),
      j: () => article ? step(rowOf(article), 1) : step({ number: -1 }, 1),
      k: () => article && step(rowOf(article), -1),
      ArrowRight: () => article && go(rowOf(article), 1),
      ArrowLeft: () => article && go(rowOf(article), -1),
    };
    if (Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    }
  });

  data.files.forEach((name, at) => file.append(new Option(name, at)));
  for (const id of new Set(rows.flatMap(row => row.findings))) finding.append(new Option(id, id));
  for (const input of [search, file, finding, trainedOnly, found, truncated])
    input.addEventListener("input", show);
  const sight = new IntersectionObserver(entries => {
    for (const entry of entries)
      if (entry.isIntersecting) {
        fill(rowOf(entry.target));
        sight.unobserve(entry.target);
      }
  }, { rootMargin: "800px" });
  for (const row of rows) {
    main.append(row.article);
    sight.observe(row.article);
  }
  show();
  document.documentElement.dataset.ready = "yes";
})();
