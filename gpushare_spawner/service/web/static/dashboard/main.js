// The dashboard: shows the page of the address, live.

import { start } from "./view.js";

start();
