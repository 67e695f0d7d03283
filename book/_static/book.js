// Theme, contents on a phone, and the section being read. No library.
"use strict";

const root = document.documentElement;

// Search results on disk: a page opened as a file may not fetch another.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined")
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// Follow the system until the reader chooses.
const storedTheme = () => {
  try { return localStorage.getItem("theme"); } catch (error) { return null; }
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  if (!storedTheme()) root.dataset.theme = event.matches ? "dark" : "light";
});

// Open the <details> that hide the target of a link.
const reveal = () => {
  const id = decodeURIComponent(location.hash.slice(1));
  const target = id && document.getElementById(id);
  if (!target) return;
  let hidden = false;
  for (let box = target.closest("details") ?? target.querySelector(":scope > details");
       box; box = box.parentElement.closest("details")) {
    hidden ||= !box.open;
    box.open = true;
  }
  if (hidden) target.scrollIntoView();
};
addEventListener("hashchange", reveal);

// What a search has found is in view, if only folded code has it.
const revealFound = () => {
  const found = [...document.querySelectorAll(".highlighted")];
  const shut = found.map((word) => word.closest("details:not([open])"));
  if (shut.every(Boolean)) for (const box of shut) box.open = true;
};

// A formula in a line of text that is wider than the line scrolls inside itself.
const fitFormulas = () => {
  for (const formula of document.querySelectorAll("mjx-container:not([display])")) {
    formula.classList.remove("too-wide");
    const line = formula.closest("p, li, td, th, dd, dt, h1, h2, h3, h4, summary, figcaption");
    const room = (line ?? document.body).getBoundingClientRect().right + 1;
    if (formula.getBoundingClientRect().right > room) formula.classList.add("too-wide");
  }
};

// The parts of TeX between the places, outside of braces and environments, where `at` matches.
const partsOf = (tex, at) => {
  const parts = [""];
  let depth = 0;
  for (const [piece] of tex.matchAll(/\\[a-zA-Z]+|\\.|[^]/g)) {
    if (/^(\{|\\begin|\\left)$/.test(piece)) depth += 1;
    if (/^(\}|\\end|\\right)$/.test(piece)) depth -= 1;
    if (!depth && at.test(piece)) parts.push(at === RELATION ? piece : "");
    else parts[parts.length - 1] += piece;
  }
  return parts.map((part) => part.trim()).filter(Boolean);
};
const GAP = /^\\qquad$/, ROW = /^\\\\$/, RELATION = /^(=|<|>|\\(le|ge|leq|geq|approx|sim|equiv|propto|ll|gg))$/;

// The same formula on more lines: what a wide gap separates, then before each relation.
const onMoreLines = (tex, relations) => {
  const inner = tex.replace(/^\s*\\begin\{(split|aligned)\}([^]*)\\end\{\1\}\s*$/, "$2");
  if (inner !== tex) return onMoreLines(inner, relations);
  const rows = partsOf(tex, ROW).flatMap((row) => partsOf(row, GAP));
  const lines = rows.flatMap((row) => {
    if (!relations) return [row.includes("&") ? row : `& ${row}`];
    const parts = partsOf(row.replace(/&/g, ""), RELATION);
    return parts.map((part, i) => (i ? "&\\quad " : "& ") + part);
  });
  return `\\begin{aligned}${lines.join("\\\\[0.3em]")}\\end{aligned}`;
};

// A formula on a line of its own that is wider than the column: broken, at last made smaller.
const breakFormulas = () => {
  const { document: typeset } = window.MathJax?.startup ?? {};
  for (const item of [...(typeset?.math ?? [])]) {
    const box = () => item.typesetRoot;
    if (!item.display || !box()?.closest("article")) continue;
    const write = (tex) => { item.math = tex; item.rerender(typeset, 20); }; // from the TeX on
    const over = () => box().scrollWidth / Math.max(1, box().clientWidth);
    item.whole ??= item.math;
    if (item.math !== item.whole) write(item.whole);
    for (const relations of [false, true])
      if (over() > 1.005) write(onMoreLines(item.whole, relations));
    if (over() > 1.005 && over() < 1.45) box().style.fontSize = `${90 / over()}%`;
  }
};

// Tab stops at what scrolls, which not every browser sees to itself, and at no other formula.
const SCROLLERS = "pre, .sig, .table-scroll, .output.text_html, mjx-container";
const reachScrollers = () => {
  const boxes = [...document.querySelectorAll(SCROLLERS)];
  const wide = boxes.map((box) => box.scrollWidth > box.clientWidth
    && getComputedStyle(box).overflowX === "auto");
  boxes.forEach((box, i) => {
    if (wide[i]) box.tabIndex = 0;
    else if (box.tabIndex === 0) box.removeAttribute("tabindex");
  });
};
let width = null;
const fit = () => {
  if (innerWidth !== width) breakFormulas();
  width = innerWidth;
  fitFormulas();
  reachScrollers();
};
addEventListener("load", () => {
  setTimeout(revealFound, 100); // Sphinx marks the words a moment after the page is there
  (window.MathJax?.startup?.promise ?? Promise.resolve()).then(() => {
    fit();
    addEventListener("resize", () => requestAnimationFrame(fit));
  });
});

document.addEventListener("DOMContentLoaded", () => {
  const $ = (selector) => document.querySelector(selector);
  reveal();

  // Keep a formula on the line of the comma that follows it.
  for (const formula of document.querySelectorAll("article span.math")) {
    const after = formula.nextSibling;
    const mark = after?.nodeType === Node.TEXT_NODE && after.data.match(/^[^\s(–—-]+/);
    if (!mark || mark[0].length > 3) continue;
    after.splitText(mark[0].length);
    const pair = document.createElement("span");
    pair.className = "nobreak";
    formula.replaceWith(pair);
    pair.append(formula, after);
  }

  $(".theme-button").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch (error) {}
  });

  const menu = $(".menu-button");
  const showMenu = (open) => {
    root.classList.toggle("menu-open", open);
    menu.setAttribute("aria-expanded", String(open));
    if (open) ($(".contents a.current") ?? $(".contents a")).focus();
  };
  menu.addEventListener("click", () => showMenu(!root.classList.contains("menu-open")));
  $(".backdrop").addEventListener("click", () => showMenu(false));
  $(".contents").addEventListener("click", (event) => {
    if (event.target.closest("a")) showMenu(false);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && root.classList.contains("menu-open")) {
      showMenu(false);
      menu.focus();
    }
    if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      $("input[name=q]").focus();
    }
  });

  // Keep the current chapter in view of the contents.
  const current = $(".contents a.current");
  const contents = $(".contents");
  if (current && current.offsetTop > contents.clientHeight * 0.8)
    contents.scrollTop = current.offsetTop - contents.clientHeight / 2;

  // Mark the section being read.
  const links = new Map(
    [...document.querySelectorAll(".page-toc a[href^='#']")].map((a) => [a.hash.slice(1), a])
  );
  const sections = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
  if (!sections.length) return;
  let scheduled = false;
  const mark = () => {
    scheduled = false;
    const passed = sections.filter((section) => section.getBoundingClientRect().top < 140);
    const here = links.get((passed.at(-1) ?? sections[0]).id);
    links.forEach((a) => a.classList.toggle("here", a === here));
  };
  addEventListener("scroll", () => {
    if (!scheduled) requestAnimationFrame(mark);
    scheduled = true;
  }, { passive: true });
  mark();
});
