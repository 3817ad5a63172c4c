/* Checking and decoding the columns of a frame. Every length is checked before it is believed. */
#include "speed.h"

/* As in frame.py. */
#define MAX_EVENTS 65535

typedef struct {
    const uint8_t *index, *times, *datas, *content_index;
    size_t index_n, content_index_n;
} Columns;

static uint64_t
get_be(const uint8_t *p, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++)
        v = v << 8 | p[i];
    return v;
}

/* A binary at *at; moves on behind it. False if it is not one or does not end before `end`. */
static int
get_bin(const uint8_t **at, const uint8_t *end, const uint8_t **data, size_t *n)
{
    const uint8_t *p = *at;
    if (p >= end || *p < 0xC4 || *p > 0xC6)
        return 0;
    int width = 1 << (*p - 0xC4);
    if (end - p - 1 < width)
        return 0;
    size_t size = get_be(p + 1, width);
    p += 1 + width;
    if ((size_t)(end - p) < size)
        return 0;
    *data = p;
    *n = size;
    *at = p + size;
    return 1;
}

static int
get_array(const uint8_t **at, const uint8_t *end, size_t *n)
{
    const uint8_t *p = *at;
    if (p >= end)
        return 0;
    if ((*p & 0xF0) == 0x90) {
        *n = *p & 0x0F;
        *at = p + 1;
        return 1;
    }
    if (*p != 0xDC && *p != 0xDD)
        return 0;
    int width = *p == 0xDC ? 2 : 4;
    if (end - p - 1 < width)
        return 0;
    *n = get_be(p + 1, width);
    *at = p + 1 + width;
    return 1;
}

static unsigned
get_u16(const uint8_t *p)
{
    return (unsigned)p[0] | (unsigned)p[1] << 8;
}

/* Whether the topic index fits the table: the right length, no number beyond it, each topic as often as it says. */
static int
index_fits(const Columns *c, size_t n, PyObject *table)
{
    Py_ssize_t topics = PyList_GET_SIZE(table);
    if (!c->index_n)
        return topics == 1;
    if (c->index_n != 2 * n || (size_t)topics > n)
        return 0;
    size_t *found = PyMem_Calloc((size_t)topics, sizeof(size_t));
    if (found == NULL)
        return 0;
    int fits = 1;
    for (size_t i = 0; i < n && fits; i++) {
        unsigned which = get_u16(c->index + 2 * i);
        fits = which < (size_t)topics;
        if (fits)
            found[which]++;
    }
    for (Py_ssize_t i = 0; i < topics && fits; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        fits = PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3 &&
               number(PyTuple_GET_ITEM(entry, 2)) == (int64_t)found[i];
    }
    PyMem_Free(found);
    return fits;
}

/* Read the columns in raw[at:]; false if they are not the ordinary ones of `n` events, without keys. */
static int
scan(PyObject *raw, Py_ssize_t begin, size_t n, PyObject *table, PyObject *contents, Columns *c)
{
    if (!PyBytes_CheckExact(raw) || !PyList_CheckExact(table) || !PyList_CheckExact(contents) || begin < 0 ||
        begin > PyBytes_GET_SIZE(raw) || !n)
        return 0;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(raw) + begin;
    const uint8_t *end = (const uint8_t *)PyBytes_AS_STRING(raw) + PyBytes_GET_SIZE(raw);
    const uint8_t *data;
    size_t size, entries;
    if (!get_array(&at, end, &entries) || entries != 5 || !get_bin(&at, end, &c->index, &c->index_n) ||
        !get_bin(&at, end, &c->times, &size) || size != 8 * n || !get_array(&at, end, &entries) || entries != n)
        return 0;
    c->datas = at;
    for (size_t i = 0; i < n; i++)
        if (!get_bin(&at, end, &data, &size))
            return 0;
    if (!get_bin(&at, end, &c->content_index, &c->content_index_n) || !get_array(&at, end, &entries) || entries ||
        at != end)
        return 0;
    size_t kinds = (size_t)PyList_GET_SIZE(contents);
    if (!c->content_index_n) {
        if (kinds > 1)
            return 0;
    }
    else {
        if (c->content_index_n != 2 * n)
            return 0;
        for (size_t i = 0; i < n; i++)
            if (get_u16(c->content_index + 2 * i) >= kinds)
                return 0;
    }
    return index_fits(c, n, table);
}

PyObject *
speed_check_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "check_columns takes 5 arguments");
        return NULL;
    }
    Columns c;
    int64_t at = number(args[1]), n = number(args[2]);
    return PyBool_FromLong(at >= 0 && n > 0 && scan(args[0], (Py_ssize_t)at, (size_t)n, args[3], args[4], &c));
}

PyObject *
speed_read_events(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 9) {
        PyErr_SetString(PyExc_TypeError, "read_events takes 9 arguments");
        return NULL;
    }
    PyObject *table = args[3], *contents = args[4], *source = args[5], *epoch = args[6], *event = args[8];
    int64_t begin = number(args[1]), n = number(args[2]), offset = number(args[7]);
    Columns c;
    if (begin < 0 || n <= 0 || n > MAX_EVENTS || offset < 0)
        Py_RETURN_NONE;
    /* Before looking at anything: making a list can run the garbage collector, and nothing after it does. */
    PyObject *events = PyList_New((Py_ssize_t)n);
    if (events == NULL)
        return NULL;
    if (!scan(args[0], (Py_ssize_t)begin, (size_t)n, table, contents, &c)) {
        Py_DECREF(events);
        Py_RETURN_NONE;
    }
    Py_ssize_t topics = PyList_GET_SIZE(table), kinds = PyList_GET_SIZE(contents);
    int64_t *seqs = PyMem_Malloc((size_t)topics * sizeof(int64_t));
    if (seqs == NULL) {
        Py_DECREF(events);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < topics; i++) {
        PyObject *entry = PyList_GET_ITEM(table, i);
        seqs[i] = PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3 ? number(PyTuple_GET_ITEM(entry, 1)) : -1;
        if (seqs[i] < 0) {
            PyMem_Free(seqs);
            Py_DECREF(events);
            Py_RETURN_NONE;
        }
    }
    const uint8_t *at = c.datas, *end = (const uint8_t *)PyBytes_AS_STRING(args[0]) + PyBytes_GET_SIZE(args[0]);
    for (int64_t i = 0; events != NULL && i < n; i++) {
        const uint8_t *data;
        size_t size;
        uint64_t stamp = 0;
        unsigned topic = c.index_n ? get_u16(c.index + 2 * i) : 0;
        for (int k = 7; k >= 0; k--)
            stamp = stamp << 8 | c.times[8 * i + k];
        get_bin(&at, end, &data, &size);
        PyObject *found[8];
        found[0] = source;
        found[1] = epoch;
        found[2] = PyLong_FromLongLong(offset + i);
        found[3] = PyTuple_GET_ITEM(PyList_GET_ITEM(table, topic), 0);
        found[4] = PyLong_FromLongLong(seqs[topic]++);
        found[5] = PyLong_FromLongLong((int64_t)stamp);
        found[6] = PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
        if (kinds)
            found[7] = PyList_GET_ITEM(contents, c.content_index_n ? get_u16(c.content_index + 2 * i) : 0);
        PyObject *made = NULL;
        if (found[2] && found[4] && found[5] && found[6])
            made = PyObject_Vectorcall(event, found, kinds ? 8 : 7, NULL);
        Py_XDECREF(found[2]);
        Py_XDECREF(found[4]);
        Py_XDECREF(found[5]);
        Py_XDECREF(found[6]);
        if (made == NULL)
            Py_CLEAR(events);
        else
            PyList_SET_ITEM(events, (Py_ssize_t)i, made);
    }
    PyMem_Free(seqs);
    return events;
}
