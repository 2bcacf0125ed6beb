"""The page: what stands on it. What it shows is fetched by the browser from the JSON API (assets/*.js)."""

from __future__ import annotations

from pathlib import Path

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, dcc, html
from dash_ag_grid import AgGrid

from mlflow_tokens.comparison.table import DENOMINATORS
from mlflow_tokens.views.api import API_PATH, MAX_CURVES
from mlflow_tokens.views.text import AUTOLOG_LINE, TEXT

ASSETS = Path(__file__).parent / "assets"

GRID_OPTIONS = {
    "theme": {"function": "gridTheme(themeQuartz)"},
    "rowHeight": 30,
    "headerHeight": 34,
    "rowSelection": {
        "mode": "multiRow",
        "headerCheckbox": False,
        "isRowSelectable": {"function": "isRun(params)"},
        "hideDisabledCheckboxes": True,
    },
    "selectionColumnDef": {"width": 40, "pinned": "left"},
    "isFullWidthRow": {"function": "isDivider(params)"},
    "fullWidthCellRenderer": "GroupDivider",
    "postSortRows": {"function": "groupTogether(params)"},
    "tooltipShowDelay": 300,
    "enableCellTextSelection": True,
    "suppressNoRowsOverlay": True,
    "suppressColumnVirtualisation": True,
    "animateRows": False,
}


def create_page(base: str, run_link: str) -> Dash:
    """The Dash app of the page, not yet on a server.

    Args:
        base: path of the page on its host, with a slash at both ends, as in "/tokens/".
        run_link: where a run's name leads, with {experiment_id} and {run_id} in it.
    """
    page = Dash(
        __name__,
        server=False,
        routes_pathname_prefix=base,
        requests_pathname_prefix=base,
        assets_folder=str(ASSETS),
        serve_locally=True,
        compress=False,
        enable_mcp=False,
        title=TEXT["en"]["title"],
        update_title="",
        meta_tags=[{"name": "color-scheme", "content": "light dark"}],
    )
    page.layout = _layout(base, run_link)
    _add_callbacks(page)
    return page


def _text(key: str) -> html.Span:
    """A text that follows the language switch."""
    return html.Span(TEXT["en"][key], id={"text": key})


def _layout(base: str, run_link: str) -> html.Div:
    setup = {
        "api": f"{base}{API_PATH}/",
        "run_link": run_link,
        "max_curves": MAX_CURVES,
        "autolog": AUTOLOG_LINE,
        "text": TEXT,
    }
    return html.Div(
        className="mt-page",
        children=[
            dcc.Store(id="setup", data=setup),
            dcc.Store(id="mlflow-tokens-language", storage_type="local"),
            dcc.Store(id="answer"),
            dcc.Store(id="dark", data=False),
            html.Header(
                className="mt-header",
                children=[
                    html.Div([html.H1(_text("title")), html.P(_text("subtitle"))]),
                    html.Nav(
                        [
                            html.A(_text("back"), href=run_link.split("#", maxsplit=1)[0]),
                            html.Div(
                                className="mt-languages",
                                children=[
                                    html.Button("English", id="language-en", lang="en", n_clicks=0),
                                    html.Button("中文", id="language-zh", lang="zh", n_clicks=0),
                                ],
                            ),
                        ]
                    ),
                ],
            ),
            html.Section(
                className="mt-controls",
                children=[
                    html.Div(
                        className="mt-control",
                        children=[
                            html.Span(_text("by"), className="mt-label", id="by-label"),
                            dcc.RadioItems(
                                id="by", className="mt-by", options=list(DENOMINATORS), value=DENOMINATORS[0]
                            ),
                        ],
                    ),
                    html.Div(
                        className="mt-control mt-grow",
                        children=[
                            html.Label(_text("experiment"), className="mt-label", htmlFor="experiment"),
                            dcc.Dropdown(id="experiment", className="mt-experiment", multi=True, options=[]),
                        ],
                    ),
                    html.Button(_text("refresh"), id="refresh", className="mt-button", n_clicks=0),
                ],
            ),
            html.Main(
                [
                    html.Div(id="message", role="status"),
                    html.Section(
                        id="runs",
                        className="mt-panel",
                        hidden=True,
                        children=[
                            html.Div(
                                [html.H2(_text("table")), html.Span(id="summary"), _text("hint")],
                                className="mt-panel-head",
                            ),
                            AgGrid(
                                id="grid",
                                columnDefs=[],
                                rowData=[],
                                getRowId="params.data.run_id",
                                defaultColDef={"resizable": True, "sortable": True, "filter": False},
                                dashGridOptions=GRID_OPTIONS,
                                style={"height": "200px", "width": "100%"},
                            ),
                        ],
                    ),
                    html.Section(
                        id="plot-panel",
                        className="mt-panel",
                        hidden=True,
                        children=[
                            html.Div(
                                [html.H2(_text("plot")), html.Span(id="plot-note")], className="mt-panel-head"
                            ),
                            html.Div(id="plot", className="mt-plot"),
                        ],
                    ),
                ]
            ),
        ],
    )


def _add_callbacks(page: Dash) -> None:
    """Bind the functions of assets/*.js. None of them calls the server but through the JSON API."""
    setup = State("setup", "data")
    language = Input("mlflow-tokens-language", "data")

    def bind(function: str, *arguments: Output | Input | State, initially: bool = True) -> None:
        page.clientside_callback(
            ClientsideFunction("mlflowTokens", function), *arguments, prevent_initial_call=not initially
        )

    bind(
        "chooseLanguage",
        Output("mlflow-tokens-language", "data"),
        Input("language-en", "n_clicks"),
        Input("language-zh", "n_clicks"),
        initially=False,
    )
    bind(
        "speak",
        Output({"text": ALL}, "children"),
        Output("by", "options"),
        Output("experiment", "placeholder"),
        Output("experiment", "labels"),
        Output("language-en", "aria-pressed"),
        Output("language-zh", "aria-pressed"),
        language,
        State({"text": ALL}, "id"),
        setup,
    )
    bind("fetchExperiments", Output("experiment", "options"), Input("refresh", "n_clicks"), setup)
    bind(
        "fetchRuns",
        Output("answer", "data"),
        Input("by", "value"),
        Input("experiment", "value"),
        Input("refresh", "n_clicks"),
        setup,
    )
    bind(
        "showRuns",
        Output("message", "children"),
        Output("runs", "hidden"),
        Output("summary", "children"),
        Output("grid", "columnDefs"),
        Output("grid", "rowData"),
        Output("grid", "style"),
        Input("answer", "data"),
        language,
        State("experiment", "value"),
        setup,
    )
    bind(
        "showCurves",
        Output("plot-panel", "hidden"),
        Output("plot", "children"),
        Output("plot-note", "children"),
        Input("answer", "data"),
        Input("grid", "selectedRows"),
        language,
        Input("dark", "data"),
        setup,
    )
