"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView({ block: "start" });
    }
  };
  addEventListener("hashchange", open);
  open();
  // Paper cannot be clicked: what failed or lost something is printed with its timeline.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")].filter(
      (run) => run.querySelector("[data-m=lost]").textContent !== "0" || !run.querySelector(".badge.pass"),
    );
    opened.forEach((run) => { run.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((run) => { run.open = false; }));
})();
