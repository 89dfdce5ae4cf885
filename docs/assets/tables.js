// Below the first link of a page to each data file, the file as a table with a search. Without scripts the link remains.
document.addEventListener("DOMContentLoaded", () => {
  const shown = new Set();
  for (const link of document.querySelectorAll('article a[href*="data/"][href$=".json"]')) {
    if (shown.has(link.href)) continue;
    shown.add(link.href);
    const place = link.closest("ul, ol, p");
    const box = document.createElement("div");
    box.className = "data";
    place.after(box);
    fetch(link.href)
      .then((answer) => (answer.ok ? answer.json() : Promise.reject(answer.statusText)))
      .then((rows) => box.append(...table(link.textContent, rows)))
      .catch((reason) => box.append(`${link.textContent} cannot be shown here (${reason}). Open the file, or \`make docs ARGS=serve\`.`));
  }
});

function table(name, rows) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  const count = document.createElement("output");
  const scroll = document.createElement("div");
  const body = document.createElement("tbody");
  const head = document.createElement("tr");
  input.type = "search";
  label.append(`Search ${name}: `, input);
  scroll.className = "md-typeset__scrollwrap";
  head.append(...Object.keys(rows[0]).map((column) => cell("th", column)));
  body.append(
    ...rows.map((row) => {
      const line = document.createElement("tr");
      line.append(...Object.values(row).map((value) => cell("td", value)));
      return line;
    }),
  );
  const whole = document.createElement("table");
  whole.createTHead().append(head);
  whole.append(body);
  scroll.append(whole);
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/);
    let number = 0;
    for (const line of body.rows) {
      const text = line.textContent.toLowerCase();
      line.hidden = !words.every((word) => text.includes(word));
      number += !line.hidden;
    }
    count.textContent = `${number} of ${rows.length} rows`;
  };
  input.addEventListener("input", show);
  show();
  return [label, " ", count, scroll];
}

// A value is text, in which backticks mark code, or a list of texts with a line each.
function cell(kind, value) {
  const made = document.createElement(kind);
  for (const text of Array.isArray(value) ? value : [value]) {
    const line = document.createElement("div");
    for (const [index, part] of String(text).split("`").entries()) {
      if (index % 2) line.appendChild(document.createElement("code")).textContent = part;
      else line.append(part);
    }
    made.append(line);
  }
  return made;
}
