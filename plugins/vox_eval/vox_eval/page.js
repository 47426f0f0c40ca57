"use strict";
// Only the rows in sight are elements. Whatever comes from the data is put in as text, never as markup.
(() => {
  const HEIGHT = 28, WORDS = 1500;
  const data = JSON.parse(document.getElementById("data").textContent);
  const [search, task, kind, count, list, space, rows, detail] =
    ["search", "task", "kind", "count", "list", "space", "rows", "detail"]
      .map(id => document.getElementById(id));
  const two = data.models.length > 1;
  // What could steer the reading: control characters, direction marks, halves of surrogates.
  const STEERING = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2066-\\u2069]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|" +
    "(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");
  const plain = text => text.replace(STEERING, found =>
    "\\u" + found.charCodeAt(0).toString(16).padStart(4, "0"));

  const make = (kind, name, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = plain(text);
    return made;
  };

  // A sample: [task, prompt, [answer, score, why] of each model].
  const samples = data.samples.map(([task, prompt, ...answers], number) => {
    const low = [prompt, ...answers.map(each => each[0])].join("\n").toLowerCase();
    const gain = two ? (answers[0][1] - answers[1][1]) * (data.tasks[task].higher ? 1 : -1) : 0;
    return { task, prompt, answers, number, low, gain };
  });
  const KINDS = {
    right: each => each.answers[0][1] === 1,
    wrong: each => each.answers[0][1] === 0,
    better: each => each.gain > 0,
    worse: each => each.gain < 0,
    other: each => each.answers[0][0] !== each.answers[1][0],
  };

  let found = samples, selected = -1, from = -1, to = -1;

  const score = value => Number.isInteger(value) ? String(value) : value.toFixed(4);

  const rowOf = at => {
    const each = found[at], row = make("div", "row");
    row.dataset.at = at;
    row.id = `row-${at}`;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", at === selected);
    each.answers.forEach(([, value], model) => {
      const colour = two ? (model ? "" : each.gain > 0 ? " good" : each.gain < 0 ? " bad" : "") :
        value === 1 ? " good" : value === 0 ? " bad" : "";
      row.append(make("span", "mark" + colour, score(value)));
    });
    row.append(make("span", "faint", data.tasks[each.task].id));
    row.append(make("span", "", each.prompt.slice(each.prompt.lastIndexOf("\nuser: ") + 1).slice(0, 300).replace(/\s+/g, " ")));
    return row;
  };

  const draw = force => {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 10);
    const last = Math.min(found.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 10);
    if (!force && first === from && last === to) return;
    [from, to] = [first, last];
    rows.style.setProperty("top", `${first * HEIGHT}px`);
    rows.replaceChildren(...Array.from({ length: last - first }, (_, at) => rowOf(first + at)));
  };

  const words = text => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [];
  const differences = (a, b) => {  // longest common subsequence of words; null if there are too many
    const one = words(a), other = words(b), n = one.length, m = other.length;
    if (n > WORDS || m > WORDS) return null;
    const table = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i -= 1)
      for (let j = m - 1; j >= 0; j -= 1)
        table[i][j] = one[i] === other[j] ? table[i + 1][j + 1] + 1 :
          Math.max(table[i + 1][j], table[i][j + 1]);
    const sides = [one.map(() => false), other.map(() => false)];
    for (let i = 0, j = 0; i < n && j < m;) {
      if (one[i] === other[j]) sides[0][i++] = sides[1][j++] = true;
      else if (table[i + 1][j] >= table[i][j + 1]) i += 1;
      else j += 1;
    }
    return [[one, sides[0]], [other, sides[1]]];
  };

  const answer = (text, marked, kind) => {
    const made = make("pre");
    if (!marked) made.textContent = plain(text);
    else marked[0].forEach((word, at) =>
      made.append(marked[1][at] ? plain(word) : make(kind, "", word)));
    return made;
  };

  const show = at => {
    selected = at;
    draw(true);
    detail.replaceChildren();
    const each = found[at];
    if (!each) return;
    list.setAttribute("aria-activedescendant", `row-${at}`);
    detail.append(make("h2", "", `${data.tasks[each.task].id}, sample ${each.number + 1}`));
    detail.append(make("pre", "", each.prompt));
    const answers = make("div");
    answers.id = "answers";
    const marked = two ? differences(each.answers[0][0], each.answers[1][0]) : null;
    each.answers.forEach(([text, value, why], model) => {
      const side = make("section");
      side.append(make("h2", "", `${data.models[model]}: ${score(value)}`), make("p", "faint", why));
      side.append(answer(text, marked && marked[model], model ? "del" : "ins"));
      answers.append(side);
    });
    detail.append(answers);
  };

  const filter = () => {
    const text = search.value.toLowerCase(), of = KINDS[kind.value];
    found = samples.filter(each =>
      (!task.value || each.task === Number(task.value)) && (!of || of(each)) &&
      (!text || each.low.includes(text)));
    space.style.setProperty("height", `${found.length * HEIGHT}px`);
    list.scrollTop = 0;
    count.textContent =
      `${found.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")} samples`;
    show(found.length ? 0 : -1);
  };

  const go = by => {
    if (!found.length) return;
    const at = Math.max(0, Math.min(found.length - 1, selected + by));
    if (at * HEIGHT < list.scrollTop) list.scrollTop = at * HEIGHT;
    const end = (at + 1) * HEIGHT - list.clientHeight;
    if (end > list.scrollTop) list.scrollTop = end;
    show(at);
  };

  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const keys = { "/": () => search.focus(), j: () => go(1), k: () => go(-1),
      ArrowDown: () => go(1), ArrowUp: () => go(-1) };
    if (Object.hasOwn(keys, event.key)) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  rows.addEventListener("click", event => {
    const row = event.target.closest(".row");
    if (row) show(Number(row.dataset.at));
  });
  list.addEventListener("scroll", () => draw(false));
  window.addEventListener("resize", () => draw(true));
  for (const input of [search, task, kind]) input.addEventListener("input", filter);

  const head = make("tr");
  head.append(...["task", ...data.models].map(text => make("th", "", text)));
  document.querySelector("thead").append(head);
  data.tasks.forEach(({ id, scores }, at) => {
    const line = make("tr");
    line.append(make("td", "", id), ...scores.map(text => make("td", "", text)));
    document.querySelector("tbody").append(line);
    task.append(new Option(plain(id), at));
  });
  if (two) kind.append(new Option("better than the other", "better"),
    new Option("worse than the other", "worse"), new Option("another answer", "other"));
  filter();
  document.documentElement.dataset.ready = "yes";
})();
