"use strict";
// The item browser. All text of models and data sets goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const [run, view, kind, search] = ["run", "view", "kind", "search"].map(find);
  const WITHOUT = "no_context";
  const OTHER_TASK = "other_task";

  const isRight = (item, name) => item.views[name].correct;
  const harmed = (item) => isRight(item, WITHOUT) && !isRight(item, view.value);
  const helped = (item) => !isRight(item, WITHOUT) && isRight(item, view.value);
  const KINDS = {
    changed: ["changed: harmed or helped", (item) => harmed(item) || helped(item)],
    harmed: ["harmed: right without, wrong with", harmed],
    helped: ["helped: wrong without, right with", helped],
    all: ["all", () => true],
  };
  // Another task's context has right answers of its own: it does no harm, it is followed or not.
  const KINDS_OF_OTHER_TASK = {
    followed: ["followed", (item) => isRight(item, OTHER_TASK)],
    ignored: ["not followed", (item) => !isRight(item, OTHER_TASK)],
    all: ["all", () => true],
  };
  let kinds = KINDS;
  let matching = [];
  let position = 0;

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function fill(select, options) {
    const before = select.value;
    select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
    if (options.some(([value]) => String(value) === before)) select.value = before;
  }

  function fillViews() {
    fill(view, data.runs[run.value].views.map((name) => [name, data.names[name]]));
    fillKinds();
  }

  function fillKinds() {
    kinds = view.value === OTHER_TASK ? KINDS_OF_OTHER_TASK : KINDS;
    fill(kind, Object.entries(kinds).map(([value, [label]]) => [value, label]));
  }

  function says(item, text) {
    const words = [item.id, item.group, data.prompts[item.prompt]];
    for (const name of [WITHOUT, view.value]) words.push(item.views[name].response, item.views[name].answer);
    return words.some((word) => word && word.toLowerCase().includes(text));
  }

  function choose() {
    const text = search.value.trim().toLowerCase();
    const ofKind = kinds[kind.value][1];
    matching = data.items.filter(
      (item) => item.run === Number(run.value) && view.value in item.views && ofKind(item) && says(item, text));
    position = 0;
    show();
  }

  function facts(answered) {
    const list = element("dl");
    const add = (name, value) => list.append(element("dt", name), element("dd", value));
    add("answer read", answered.answer ?? "no answer");
    if (answered.expected) add("expected answer", answered.expected);
    add("length", `${answered.length} tokens${answered.truncated ? ", cut" : ""}`);
    return list;
  }

  function turns(answered) {
    const list = element("ol", undefined, "turns");
    for (const turn of answered.turns) {
      const entry = element("li");
      entry.value = turn.number;
      const action = turn.action ?? "no action";
      entry.append(
        element("p", turn.valid === false ? `${action} (not possible)` : action, "action"),
        element("pre", turn.response), element("pre", turn.board, "board"));
      list.append(entry);
    }
    return list;
  }

  function side(item, name) {
    const answered = item.views[name];
    const part = element("section");
    const heading = element("h4", `${data.names[name]}: `);
    const right = name === OTHER_TASK ? ["followed", "not followed"] : ["right", "wrong"];
    heading.append(element("span", right[answered.correct ? 0 : 1], answered.correct ? "right" : "wrong"));
    part.append(heading, facts(answered));
    part.append(answered.turns ? turns(answered) : element("pre", answered.response ?? "", "response"));
    return part;
  }

  function show() {
    const item = matching[position];
    find("position").textContent = item ? `${position + 1} of ${matching.length}` : "no item";
    find("previous").disabled = position === 0;
    find("next").disabled = position + 1 >= matching.length;
    const place = find("item");
    if (!item) {
      place.replaceChildren(element("p", "No item is so. Choose another kind, or search for something else."));
      return;
    }
    const title = [item.id];
    if (item.sample) title.push(`sample ${item.sample}`);
    if (item.group) title.push(item.group);
    const sides = element("div", undefined, "sides");
    sides.append(side(item, WITHOUT), side(item, view.value));
    place.replaceChildren(
      element("h3", title.join(" · ")), element("h4", "prompt"), element("pre", data.prompts[item.prompt]), sides);
  }

  function move(by) {
    position = Math.min(Math.max(position + by, 0), Math.max(matching.length - 1, 0));
    show();
  }

  fill(run, data.runs.map((one, number) => [number, one.label]));
  fillViews();
  run.addEventListener("change", () => { fillViews(); choose(); });
  view.addEventListener("change", () => { fillKinds(); choose(); });
  kind.addEventListener("change", choose);
  search.addEventListener("input", choose);
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("previous").addEventListener("click", () => move(-1));
  find("next").addEventListener("click", () => move(1));
  document.addEventListener("keydown", (event) => {
    // Where arrows already mean something (a field, a table that scrolls), they keep it.
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, .scroll")) return;
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  choose();
  find("browser").hidden = false;
})();
