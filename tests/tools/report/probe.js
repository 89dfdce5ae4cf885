// What a reader could stumble over, found in the page itself; returned as lists that have to be empty.
(() => {
  const found = {overflow: [], contrast: [], unnamed: [], headings: [], small: []};
  document.querySelectorAll("details").forEach(one => { one.open = true; });

  const told = element => `${element.tagName.toLowerCase()}.${element.className}: ${element.textContent.trim().slice(0, 40)}`;
  const seen = element => {
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.height > 1 && getComputedStyle(element).visibility === "visible";
  };
  const inside = innerWidth;
  if (document.documentElement.scrollWidth > inside) found.overflow.push(`page ${document.documentElement.scrollWidth}`);
  for (const element of document.body.querySelectorAll("*")) {
    if (!seen(element) || element.closest(".sr, .skip")) continue;
    const box = element.getBoundingClientRect();
    if (box.right > inside + 1 || box.left < -1) found.overflow.push(told(element));
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 1) found.overflow.push(`inside ${told(element)}`);
  }

  const channels = colour => colour.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = channels(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const known = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || known.has(element) || !seen(element) || element.closest(".sr, .skip")) continue;
    known.add(element);
    const [one, other] = [luminance(channels(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) found.contrast.push(`${ratio.toFixed(2)} ${told(element)}`);
    if (parseFloat(getComputedStyle(element).fontSize) < 11) found.small.push(told(element));
  }

  for (const table of document.querySelectorAll("table"))
    if (!table.caption && !table.getAttribute("aria-label")) found.unnamed.push(told(table));
  for (const link of document.querySelectorAll("a"))
    if (!(link.getAttribute("aria-label") || link.textContent).trim()) found.unnamed.push(link.outerHTML);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1) found.headings.push(told(heading));
    level = own;
  }
  if (document.querySelectorAll("h1").length !== 1) found.headings.push("not one h1");
  return {...found, checked: known.size, title: document.title};
})()
