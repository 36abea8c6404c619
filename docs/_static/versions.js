// The versions of the site, as docs.extensions.site_versions writes them where it is published.
window.siteVersions = [];
