// Searches the pages. The index is loaded when somebody first wants to search.
"use strict";
(function () {
  const root = document.currentScript.dataset.root;
  const box = document.getElementById("search");
  const list = document.getElementById("found");
  const LIMIT = 15;

  function whenLoaded(then) {
    if (window.searchIndex) return then();
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = then;
    document.head.append(script);
  }

  // How much a word tells: the fewer sections have it, the more.
  function weighed(words) {
    const all = searchIndex.sections;
    return words.map(word => {
      const having = all.filter(([, , heading, text]) => (heading + " " + text).toLowerCase().includes(word));
      return { word, weight: Math.log(1 + all.length / (1 + having.length)) };
    });
  }

  // How well a section answers: which of the words it has, where, and which follow each other.
  function rated(section, words) {
    const [page, , heading, text] = section;
    const lower = text.toLowerCase();
    const places = [
      [heading.toLowerCase(), 8],
      [searchIndex.pages[page][0].toLowerCase(), 4],
      [lower, 1 + 1000 / (500 + lower.length)],
    ];
    let count = 0, score = 0;
    words.forEach(({ word, weight }, k) => {
      const held = places.filter(([place]) => place.includes(word));
      if (held.length) count += 1;
      for (const [place, value] of held) {
        const startsWord = !/[\p{L}\d]/u.test(place[place.indexOf(word) - 1] || " ");
        score += weight * value * (startsWord ? 2 : 1);
      }
      const before = k ? words[k - 1] : null;
      if (before && lower.includes(before.word + " " + word)) score += 2 * (before.weight + weight);
    });
    return { section, count, score };
  }

  function find(query) {
    const words = query.toLowerCase().split(/[\s"'`()]+/).filter(Boolean);
    // Of a message that somebody pastes, names and numbers are other ones.
    const enough = words.length > 4 ? words.length / 2 : words.length;
    const weights = weighed(words);
    const found = searchIndex.sections.map(section => rated(section, weights))
      .filter(each => words.length && each.count >= enough)
      .sort((a, b) => b.score - a.score);
    return { words: weights, found };
  }

  // The text around the word that tells most, with all words marked; short ones where a word begins.
  function excerpt(text, words) {
    const pattern = new RegExp(words.map(({ word }) => {
      const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
      return word.length < 4 ? "(?<![\\p{L}\\d])" + escaped + "(?!\\p{L})" : escaped;
    }).join("|"), "giu");
    const lower = text.toLowerCase();
    const places = [...words].sort((a, b) => b.weight - a.weight).map(({ word }) => lower.indexOf(word));
    const first = places.find(place => place >= 0) ?? 0;
    const start = first < 60 ? 0 : text.indexOf(" ", first - 60) + 1;
    const space = text.indexOf(" ", start + 150);
    const part = text.slice(start, space < 0 ? text.length : space);
    const shown = document.createElement("span");
    if (start) shown.append("… ");
    let end = 0;
    for (const match of part.matchAll(pattern)) {
      const mark = document.createElement("mark");
      mark.textContent = match[0];
      shown.append(part.slice(end, match.index), mark);
      end = match.index + match[0].length;
    }
    shown.append(part.slice(end), space < 0 ? "" : " …");
    return shown;
  }

  function show() {
    const { words, found } = find(box.value);
    list.replaceChildren(...found.slice(0, LIMIT).map(({ section: [page, anchor, heading, text] }) => {
      const [title, file] = searchIndex.pages[page];
      const link = document.createElement("a");
      link.href = root + file + (anchor ? "#" + anchor : "");
      const name = document.createElement("strong");
      name.textContent = heading && heading !== title ? `${title}: ${heading}` : title;
      link.append(name, excerpt(text, words));
      link.onclick = () => { list.hidden = true; };
      const item = document.createElement("li");
      item.append(link);
      return item;
    }));
    if (words.length && !found.length) list.textContent = "No page has these words.";
    list.hidden = !words.length;
  }

  box.hidden = false;
  box.onfocus = () => whenLoaded(() => {});
  box.oninput = () => whenLoaded(show);
  document.addEventListener("keydown", event => {
    const first = list.querySelector("a");
    if (event.key === "Escape") list.hidden = true;
    if (event.key === "Enter" && event.target === box && first) first.click();
    if (event.key === "/" && !/INPUT|TEXTAREA/.test(event.target.tagName)) {
      event.preventDefault();
      box.focus();
    }
  });
  // A search can be linked to: index.html?search=words
  const asked = new URLSearchParams(location.search).get("search");
  if (asked) {
    box.value = asked;
    whenLoaded(show);
  }
})();
