// Wide tables scroll by themselves; with the keyboard, too.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset table:not([class])")) {
    const box = each.closest(".md-typeset__scrollwrap") || each;
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
