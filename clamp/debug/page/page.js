"use strict";

/* What the page does beyond being read: sorts and filters tables, copies the cure, says what a mark means.
   Without it everything can still be read. */

document.documentElement.classList.add("scripted");
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const say = (text) => { document.querySelector(".aloud").textContent = text; };

/* A column's button sorts by it, numbers from the largest; again, the other way. What has no number comes last. */
for (const table of all("table.sortable")) {
  const heads = all("thead th", table);
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("number");
    const key = (row) => {
      const cell = row.cells[column];
      return numeric ? Number(cell.dataset.key ?? cell.textContent) : cell.dataset.key ?? cell.textContent;
    };
    head.querySelector("button").addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric;
      const sign = down ? -1 : 1;
      const rows = all("tbody tr", table).sort((one, other) => {
        const [a, b] = [key(one), key(other)];
        if (!numeric) return sign * a.localeCompare(b, "en", { numeric: true });
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
        return sign * (a < b ? -1 : a > b);
      });
      table.tBodies[0].append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      say(`sorted by ${head.textContent}, ${head.getAttribute("aria-sort")}`);
    });
  });
}

/* All words of the search must be in a row; a choice must be its own. */
for (const form of all("form.filters")) {
  const rows = all(`#${form.dataset.of} tbody tr`);
  const texts = rows.map((row) => all("th, td", row).map((cell) => cell.textContent).join(" ").toLowerCase());
  const filter = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, number) => {
      const fits = words.every((word) => texts[number].includes(word))
        && ["policy", "direction"].every((name) => ["", row.dataset[name]].includes(form.elements[name].value))
        && (form.dataset.module === undefined || row.dataset.module === form.dataset.module);
      row.hidden = !fits;
      shown += fits;
    });
    const where = form.dataset.module === undefined ? "" : ` in ${form.dataset.module || "no module"}`;
    form.querySelector("output").textContent =
      shown === rows.length ? `${shown} ops` : `${shown} of ${rows.length} ops${where}`;
  };
  const showModule = (module) => {
    form.reset();
    form.dataset.module = module;
    filter();
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    delete form.dataset.module;
    setTimeout(filter); // once the fields are empty
  });
  for (const link of all("a[data-module]")) {
    link.addEventListener("click", () => setTimeout(showModule, 0, link.dataset.module));
  }
}

for (const button of all("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    const copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Selected";
    say(copied ? "copied" : "selected: press Ctrl+C");
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}

/* What is lit in the tree is in view. */
for (const lit of all(".lit")) {
  const tree = lit.closest("#modules > .tree");
  tree.scrollTop += lit.getBoundingClientRect().top - tree.getBoundingClientRect().top - tree.clientHeight / 2;
}

/* One mark of a picture takes part in the order of Tab, the others are reached from it with arrows. */
for (const marks of all(".marks")) {
  const points = all("use", marks);
  const output = marks.closest("figure").querySelector(".pointed");
  const show = (point) => { output.textContent = point.querySelector("title").textContent; };
  points.forEach((point, number) => {
    point.addEventListener("pointerenter", () => show(point));
    point.addEventListener("focus", () => {
      points.forEach((other) => other.setAttribute("tabindex", other === point ? 0 : -1));
      show(point);
    });
    point.addEventListener("keydown", (event) => {
      const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: points.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      points[Math.min(Math.max(to, 0), points.length - 1)].focus();
    });
  });
}
