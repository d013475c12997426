// The dashboard: shows the page of the address, live, with its filters and actions.

import * as dialogs from "./dialogs.js";
import * as filters from "./filters.js";
import * as view from "./view.js";

dialogs.start();
filters.start();
view.start();
document.documentElement.dataset.ready = ""; // buttons work from here on
