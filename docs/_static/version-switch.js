// Links to the other versions of the site, below its name: those that versions.js lists.
"use strict";

window.addEventListener("DOMContentLoaded", () => {
  const brand = document.querySelector(".sidebar-brand");
  const versions = window.siteVersions || [];
  if (!brand || versions.length < 2) return;
  const root = new URL(document.documentElement.dataset.content_root, document.baseURI);
  const links = document.createElement("nav");
  links.id = "site-versions";
  links.setAttribute("aria-label", "Versions");
  for (const { name, path } of versions) {
    const link = document.createElement("a");
    link.href = new URL(`${path}index.html`, root).href;
    link.textContent = name;
    // The one that is read.
    if (path === "./") link.setAttribute("aria-current", "true");
    links.append(link);
  }
  brand.after(links);
});
