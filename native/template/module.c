/* The library as a module of Python: what the boot code of a template calls. */
#include <string.h>

#include "python.h"
#include "template.h"

static struct object *nothing(void)
{
    return Py_BuildValue("");
}

static struct object *serve(struct object *self, struct object *arguments)
{
    (void)self;
    int launcher, host;
    if (!PyArg_ParseTuple(arguments, "ii", &launcher, &host))
        return NULL;
    PyOS_BeforeFork();
    serve_forks(launcher, host);
    PyOS_AfterFork_Child();
    return nothing();
}

static struct object *rehearse_here(struct object *self, struct object *arguments)
{
    (void)self;
    int fd;
    if (!PyArg_ParseTuple(arguments, "i", &fd))
        return NULL;
    rehearse(fd);
    return nothing();
}

static struct object *populate(struct object *self, struct object *arguments)
{
    (void)self;
    struct object *packed;
    char *bytes;
    ssize_t size;
    int written;
    if (!PyArg_ParseTuple(arguments, "Oi", &packed, &written) || PyBytes_AsStringAndSize(packed, &bytes, &size) < 0)
        return NULL;
    set_ranges((const void *)bytes, (size_t)written, (size_t)size / sizeof(struct range));
    return nothing();
}

static struct object *environment(struct object *self, struct object *unused)
{
    (void)self;
    (void)unused;
    struct object *list = PyList_New(0);
    for (char **at = command_environment(); list && *at; at++) {
        struct object *item = PyBytes_FromString(*at);
        int added = item ? PyList_Append(list, item) : -1;
        if (item)
            Py_DecRef(item);
        if (added < 0) {
            Py_DecRef(list);
            return NULL;
        }
    }
    return list;
}

static struct object *hold(struct object *self, struct object *object)
{
    (void)self;
    Py_IncRef(object);
    return nothing();
}

/* Whether the script has set no context variable. */
static struct object *has_no_context(struct object *self, struct object *unused)
{
    (void)self;
    (void)unused;
    if (!PyContext_CopyCurrent)
        return Py_BuildValue("i", 0);
    struct object *context = PyContext_CopyCurrent();
    if (!context)
        return NULL;
    ssize_t size = PyObject_Size(context);
    Py_DecRef(context);
    return size < 0 ? NULL : Py_BuildValue("i", size == 0);
}

/* The interpreters, and the threads of this one: 2 stands for more. A thread counts before it has begun to run. */
static struct object *count(struct object *self, struct object *unused)
{
    (void)self;
    (void)unused;
    if (!PyInterpreterState_Head || !PyInterpreterState_Next || !PyInterpreterState_ThreadHead || !PyThreadState_Next)
        return Py_BuildValue("(ii)", 2, 2);
    int interpreters = PyInterpreterState_Next(PyInterpreterState_Head()) ? 2 : 1;
    int threads = PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get())) ? 2 : 1;
    return Py_BuildValue("(ii)", interpreters, threads);
}

static struct object *can_shorten(struct object *self, struct object *unused)
{
    (void)self;
    (void)unused;
    return Py_BuildValue("i", can_finish());
}

static struct object *shorten(struct object *self, struct object *arguments)
{
    (void)self;
    int is_early;
    if (!PyArg_ParseTuple(arguments, "p", &is_early) || finish_at_event(is_early) < 0)
        return NULL;
    return nothing();
}

/* Types whose objects end without a trace, dict and tuple first; and how the objects of a class statement end. */
enum { MAX_PLAIN = 64, MAX_DEPTH = 100, MAX_KNOWN = 256, MAX_FOLLOWED = 1 << 18 };
static struct object *plain[MAX_PLAIN];
static ssize_t nplain;
static void *class_dealloc;
static struct object *known[MAX_KNOWN];
static int followed; /* references in dicts and tuples that the collector does not know: others may share these */

/* Whether nothing can be observed of the end of an object of this type, apart from the ends of those it refers to. */
static int is_plain_class(struct object *type)
{
    for (; type; type = PyType_GetSlot(type, SLOT_BASE)) {
        for (ssize_t i = 0; i < nplain; i++)
            if (plain[i] == type)
                return 1;
        if (PyType_GetSlot(type, SLOT_DEALLOC) != class_dealloc || PyType_GetSlot(type, SLOT_FINALIZE) ||
            PyType_GetSlot(type, SLOT_DEL))
            return 0;
    }
    return 0;
}

/* The same, at once for a type that was found to be so: there are few types and many objects. */
static int is_plain(struct object *type)
{
    struct object **found = &known[(uintptr_t)type / 64 % MAX_KNOWN];
    if (*found == type)
        return 1;
    if (!is_plain_class(type))
        return 0;
    *found = type;
    return 1;
}

/* An object that others refer to. The garbage collector does not know those that cannot be part of a cycle: dicts and tuples
 * are among them, and are followed. */
static int is_remarkable(struct object *object, void *data)
{
    int depth = *(int *)data + 1;
    if (!is_plain(object->type) || depth > MAX_DEPTH || (depth > 1 && ++followed > MAX_FOLLOWED))
        return 1;
    if ((object->type != plain[0] && object->type != plain[1]) || PyObject_GC_IsTracked(object))
        return 0;
    return ((traverse)PyType_GetSlot(object->type, SLOT_TRAVERSE))(object, is_remarkable, &depth);
}

/* What a weak reference refers to is a function that is called at the end of another object. */
static int is_there(struct object *object, void *data)
{
    (void)object;
    (void)data;
    return 1;
}

/* Called while Python ends, with the objects of a script that the garbage collector knows. Returns whether nothing of their
 * clean-up can be observed. `witness` is missing among the objects if the script has hidden them from the
 * collector. `reference` is the type of weak references; every class has one. `example` is a class. Looking at types and
 * references writes to no object; the clean-up would write to hundreds of shared pages. */
static struct object *can_end(struct object *self, struct object *arguments)
{
    (void)self;
    struct object *objects, *witness, *types, *reference, *example;
    if (!PyArg_ParseTuple(arguments, "OOOOO", &objects, &witness, &types, &reference, &example))
        return NULL;
    class_dealloc = PyType_GetSlot(example, SLOT_DEALLOC);
    for (nplain = 0; nplain < MAX_PLAIN && nplain < PyTuple_Size(types); nplain++)
        plain[nplain] = PyTuple_GetItem(types, nplain);
    ssize_t n = PyList_Size(objects);
    int is_complete = 0, depth = 0;
    followed = 0;
    memset(known, 0, sizeof known); /* a class may have changed since */
    for (ssize_t i = 0; i < n; i++) {
        struct object *object = PyList_GetItem(objects, i);
        is_complete |= object == witness;
        if (object->type != reference && !is_plain(object->type))
            return Py_BuildValue("i", 0);
    }
    for (ssize_t i = 0; i < n; i++) {
        struct object *object = PyList_GetItem(objects, i);
        visitor look = object->type == reference ? is_there : is_remarkable;
        if (((traverse)PyType_GetSlot(object->type, SLOT_TRAVERSE))(object, look, &depth))
            return Py_BuildValue("i", 0);
    }
    return Py_BuildValue("i", is_complete);
}

/* Leaves the clean-up out; returns if that is not possible. */
static struct object *leave(struct object *self, struct object *unused)
{
    (void)self;
    (void)unused;
    return_from_finalize();
    return nothing();
}

static const struct method_def methods[] = {
    {"serve", serve, WITH_TUPLE, NULL},
    {"rehearse", rehearse_here, WITH_TUPLE, NULL},
    {"populate", populate, WITH_TUPLE, NULL},
    {"environment", environment, WITH_NOTHING, NULL},
    {"hold", hold, WITH_OBJECT, NULL},
    {"has_no_context", has_no_context, WITH_NOTHING, NULL},
    {"count", count, WITH_NOTHING, NULL},
    {"can_shorten", can_shorten, WITH_NOTHING, NULL},
    {"shorten", shorten, WITH_TUPLE, NULL},
    {"can_end", can_end, WITH_TUPLE, NULL},
    {"leave", leave, WITH_NOTHING, NULL},
    {NULL, NULL, 0, NULL},
};

static struct module_def definition = {.head = {.references = 1}, .name = "sandbox_template", .methods = methods};

__attribute__((visibility("default"))) struct object *PyInit_sandbox_template(void)
{
    return PyModuleDef_Init(&definition);
}
