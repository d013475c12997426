/** A small plot of GPU memory (area) and use (line). */

import { ISample, linePath } from './samples';

const SVG = 'http://www.w3.org/2000/svg';

/** Draws into an SVG element of a fixed size. Colors come from the stylesheet. */
export class Plot {
  readonly node: SVGSVGElement;

  constructor(
    private readonly _width: number,
    private readonly _height: number,
    private readonly _span: number
  ) {
    this.node = document.createElementNS(SVG, 'svg');
    this.node.setAttribute('class', 'gpushare-Plot');
    this.node.setAttribute('viewBox', `0 0 ${_width} ${_height}`);
    this.node.setAttribute('width', String(_width));
    this.node.setAttribute('height', String(_height));
    // its figures are next to it as text
    this.node.setAttribute('aria-hidden', 'true');
    this._memory = this._path('gpushare-Plot-memory');
    this._use = this._path('gpushare-Plot-use');
  }

  /** Draw the samples, with the newest at the right edge. */
  draw(samples: readonly ISample[]): void {
    // a line at the edge would be clipped
    const inner = this._height - 2;
    const line = (value: (sample: ISample) => number | undefined) =>
      linePath(samples, value, this._span, this._width, inner);
    this._memory.setAttribute(
      'd',
      this._area(
        samples,
        line(sample => sample.memory)
      )
    );
    this._use.setAttribute(
      'd',
      line(sample => sample.use)
    );
  }

  /** Close the memory line to form an area. */
  private _area(samples: readonly ISample[], line: string): string {
    if (samples.length < 2) {
      return '';
    }
    const first = this._width * (1 - (samples[samples.length - 1].at - samples[0].at) / this._span);
    return `${line}L${this._width} ${this._height}L${first.toFixed(1)} ${this._height}Z`;
  }

  private _path(className: string): SVGPathElement {
    const path = document.createElementNS(SVG, 'path');
    path.setAttribute('class', className);
    path.setAttribute('transform', 'translate(0 1)');
    this.node.appendChild(path);
    return path;
  }

  private readonly _memory: SVGPathElement;
  private readonly _use: SVGPathElement;
}
